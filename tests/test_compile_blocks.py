"""Blocks shaped like torchvision's, timm's and transformers', compiled without a graph break."""

import contextlib
import copy

import pytest
import torch
from common import Block
from torch import nn
from torch.nn import functional as native
from torch.utils.checkpoint import checkpoint

import warpwright

WIDTH, HEADS = 16, 4


def heads(x, count):
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


class VisionAttention(nn.Module):
    """timm: one product for q, k and v, and norms of the heads that are switched off."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x, attn_mask=None, is_causal=False):
        batch, rows, _ = x.shape
        qkv = self.qkv(x).reshape(batch, rows, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = native.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
        return self.proj_drop(self.proj(joined(x)))


class VisionMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(32, WIDTH), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), VisionAttention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), VisionMlp()
        self.ls, self.drop_path = nn.Identity(), nn.Identity()

    def forward(self, x, attn_mask=None, is_causal=False):
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path(self.ls(attended))
        return x + self.drop_path(self.ls(self.mlp(self.norm2(x))))


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden_states.dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GroupedAttention(nn.Module):
    """Llama: half as many heads of keys and values, rotated by their positions."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        cos, sin = position_embeddings
        q = rotated(heads(self.q_proj(hidden_states), HEADS), cos, sin)
        k = rotated(heads(self.k_proj(hidden_states), HEADS // 2), cos, sin)
        v = heads(self.v_proj(hidden_states), HEADS // 2)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        x = native.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=True)
        return self.o_proj(joined(x)), None


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 40, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(40, WIDTH, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = GroupedAttention(), GatedMlp()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        past_key_values=None,
        position_embeddings=None,
        **kwargs,
    ):
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TransposedLinear(nn.Module):
    """GPT-2's Conv1D: a linear layer whose weight is (in, out)."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * 0.1)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Gpt2Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = (
            TransposedLinear(WIDTH, 3 * WIDTH),
            TransposedLinear(WIDTH, WIDTH),
        )
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(0.0)

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, use_cache=False):
        q, k, v = (heads(t, HEADS) for t in self.c_attn(self.ln_1(hidden_states)).split(WIDTH, 2))
        attended = native.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=True)
        hidden_states = self.dropout(self.c_proj(joined(attended))) + hidden_states
        inner = self.c_out(self.act(self.c_fc(self.ln_2(hidden_states))))
        hidden_states = hidden_states + self.dropout(inner)
        return (hidden_states, None) if use_cache else (hidden_states,)


def sequence(device, rows):
    return torch.randn(2, rows, WIDTH, device=device, requires_grad=True)


def positions(x):
    angles = torch.linspace(0, 1, x.shape[1] * WIDTH // HEADS, device=x.device)
    angles = angles.view(x.shape[1], -1)
    return angles.cos(), angles.sin()


# name -> the block, its input for a size, and the further arguments of a call
BLOCKS = {
    "torchvision": (
        lambda: Block(4, 6, 2),
        lambda device, n: torch.randn(2, 4, n, n, device=device, requires_grad=True),
        lambda x: {},
    ),
    "timm": (VisionBlock, sequence, lambda x: {}),
    "llama": (LlamaLayer, sequence, lambda x: {"position_embeddings": positions(x), "layer": 1}),
    "gpt2": (Gpt2Layer, sequence, lambda x: {"past_key_values": None, "use_cache": True}),
}
HOW = {
    "swap": lambda model: warpwright.swap(model),
    "fuse": lambda model: warpwright.swap(model, fuse=True),
    "patch": lambda model: None,
}


# Checkpointed without fusing is left to the long run.
@pytest.mark.parametrize(
    ("how", "checkpointed"),
    [
        pytest.param(
            how, checkpointed, marks=[pytest.mark.slow] if how != "fuse" and checkpointed else []
        )
        for how in HOW
        for checkpointed in (False, True)
    ],
)
@pytest.mark.parametrize("name", BLOCKS)
def test_no_graph_breaks(device, name, how, checkpointed):
    """Forward and backward; from the second size on, the compiled code has dynamic shapes."""
    make, inputs, arguments = BLOCKS[name]
    model = make().to(device)
    twin = copy.deepcopy(model)
    HOW[how](model)

    def step(network, x):
        kwargs = arguments(x)
        with warpwright.patch() if how == "patch" else contextlib.nullcontext():
            if checkpointed:
                result = checkpoint(network, x, use_reentrant=False, **kwargs)
            else:
                result = network(x, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    def plain(network, x):
        result = network(x, **arguments(x))
        return result[0] if isinstance(result, tuple) else result

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for size in (7, 9, 12):
        x = inputs(device, size)
        results = []
        for run, network in ((compiled, model), (plain, twin)):
            output = run(network, x)
            leaves = (x, *network.parameters())
            results.append((output, *torch.autograd.grad(output.square().mean(), leaves)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
