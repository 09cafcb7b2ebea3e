"""``context_parallel``: a model's attention runs over the tokens of all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from processes import RankError
from sharded import make_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

import warpwright
from warpwright.distributed.sequence import context_parallel, shard, unshard

WIDTH, HEADS, TOKENS, CHARACTERS = 16, 2, 12, 11


class Model(nn.Module):
    """One block of a language model; its attention is native's function."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CHARACTERS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)
        self.checkpointed = False

    def attention(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    def forward(self, tokens, places):
        x = self.tokens(tokens) + self.places(places)
        if self.checkpointed:
            x = x + checkpoint(self.attention, x, use_reentrant=False)
        else:
            x = x + self.attention(x)
        return self.head(x)


def batch():
    tokens = torch.randint(CHARACTERS, (2, TOKENS + 1))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(TOKENS)


def gradients(model, logits, labels):
    """Of the mean loss over all ranks' tokens."""
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss / (2 * TOKENS)
    return torch.autograd.grad(loss, list(model.parameters()))


def in_parallel(rank, model, data, options, how):
    tokens, labels, places = data
    mesh = make_mesh()
    if how == "swap":
        warpwright.swap(model)
    model.checkpointed = how == "checkpoint"
    buffers, dims = [tokens, labels, places], [1, 1, 0]
    whole = [buffer.clone() for buffer in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, **options):
        if how == "patch":
            with warpwright.patch():
                logits = model(tokens, places)
        else:
            logits = model(tokens, places)
        grads = gradients(model, logits, labels)
    assert all(map(torch.equal, buffers, whole))
    for grad in grads:
        dist.all_reduce(grad)
    return [unshard(logits, 1, layout=options.get("layout", "zigzag")), *grads]


@pytest.mark.parametrize("how", ["plain", "swap", "patch", "checkpoint"])
@pytest.mark.parametrize(
    "options", [{}, {"layout": "striped", "method": "ring"}, {"method": "ulysses"}]
)
def test_a_model(worlds, how, options):
    model, data = Model(), batch()
    logits = model(data[0], data[2])
    expected = [logits.detach(), *gradients(model, logits, data[1])]
    for results in worlds(2).run(in_parallel, copy.deepcopy(model), data, options, how):
        torch.testing.assert_close(results, expected)


def after_the_block(rank, model, data):
    tokens, labels, places = (shard(x, x.dim() - 1) for x in data)
    with context_parallel():
        logits = model(tokens, places)
    grads = gradients(model, logits, labels)
    for grad in grads:
        dist.all_reduce(grad)
    return [unshard(logits, 1), *grads]


def test_backward_after_the_block(worlds):
    """Without buffers that are restored, the graph needs no block."""
    model, data = Model(), batch()
    logits = model(data[0], data[2])
    expected = [logits.detach(), *gradients(model, logits, data[1])]
    for results in worlds(2).run(after_the_block, model, data):
        torch.testing.assert_close(results, expected)


def of_transformers(rank, model, tokens, options):
    buffers = [tokens.clone(), torch.arange(TOKENS)[None]]
    with context_parallel(buffers=buffers, buffer_seq_dims=[1, 1]):
        logits = model(buffers[0], position_ids=buffers[1], use_cache=False, **options).logits
    return unshard(logits, 1)


def test_a_model_of_transformers(worlds):
    """Rotary embeddings of the tokens' own positions, and grouped key heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": CHARACTERS, "hidden_size": 32, "intermediate_size": 48}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    tokens = batch()[0]
    expected = model(tokens).logits.detach()
    ones = {"attention_mask": torch.ones(2, TOKENS // 2)}
    for logits in worlds(2).run(of_transformers, model, tokens, ones):
        torch.testing.assert_close(logits, expected)
    with pytest.raises(RankError, match="passes none if it gets an attention_mask of ones"):
        worlds(2).run(of_transformers, model, tokens, {})


def multi_head(rank, layer, x, weights):
    sharded = x.clone()
    with context_parallel(buffers=[sharded], buffer_seq_dims=[1]):
        out = layer(sharded, sharded, sharded, need_weights=weights)[0]
    return unshard(out, 1)


def test_multi_head_attention(worlds):
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, TOKENS, WIDTH)
    expected = layer(x, x, x, need_weights=False)[0].detach()
    for out in worlds(2).run(multi_head, layer, x, False):
        torch.testing.assert_close(out, expected)
    with pytest.raises(RankError, match="need_weights: expected False, got True"):
        worlds(2).run(multi_head, layer, x, True)


def encoder(rank, layer, x):
    sharded = x.clone()
    with torch.no_grad(), context_parallel(buffers=[sharded], buffer_seq_dims=[1]):
        return unshard(layer(sharded), 1)


def test_inference(worlds):
    """Native's fused encoder layer, which would see one rank's tokens, is not taken."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True).eval()
    x = torch.randn(2, TOKENS, WIDTH)
    expected = layer(x).detach()
    for out in worlds(2).run(encoder, layer, x):
        torch.testing.assert_close(out, expected)


def dimensions(rank, tensors):
    """Of 2, 3 and 5 dimensions: what comes before the tokens is heads or a batch."""
    results = []
    for x in tensors:
        x = x.clone()
        with context_parallel(buffers=[x], buffer_seq_dims=[-2]):
            for function in (
                nn.functional.scaled_dot_product_attention,
                warpwright.functional.scaled_dot_product_attention,
                torch.ops.warpwright.scaled_dot_product_attention,
            ):
                results.append(unshard(function(x, x, x, is_causal=True), x.dim() - 2))
    return results


def test_dimensions(worlds):
    sizes = [(TOKENS, 8), (3, TOKENS, 8), (2, 3, 2, TOKENS, 8)]
    tensors = [torch.randn(size) for size in sizes]
    native = nn.functional.scaled_dot_product_attention
    expected = [y for x in tensors for y in [native(x, x, x, is_causal=True)] * 3]
    for results in worlds(2).run(dimensions, tensors):
        torch.testing.assert_close(results, expected)


def messages(rank):
    """What wrong uses say; buffers are restored and attention is native's again after each."""
    q = torch.randn(1, 2, 6, 8)
    attention = nn.functional.scaled_dot_product_attention
    before, x = attention(q, q, q), torch.arange(12)
    said = []
    for arguments in (
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool)},
        {"dropout_p": 0.5},
    ):
        try:
            with context_parallel(buffers=[x], buffer_seq_dims=[0]):
                attention(q, q, q, **arguments)
        except ValueError as error:
            said.append(str(error))
    for arguments in (
        {"buffers": [x, x], "buffer_seq_dims": [0]},
        {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": [q]},
        {"buffers": [x, torch.arange(7)], "buffer_seq_dims": [0, 0]},
        {"layout": "round"},
        {"method": "best"},
    ):
        try:
            with context_parallel(**arguments):
                raise AssertionError("expected an error")
        except ValueError as error:
            said.append(str(error))
    assert torch.equal(x, torch.arange(12))
    assert torch.equal(attention(q, q, q), before)
    return said


def test_errors(worlds):
    expected = [
        "attn_mask: expected None, got a mask of (6, 6)",
        "dropout_p: expected 0, got 0.5",
        "buffer_seq_dims: expected one dimension per buffer (2), got 1",
        "no_restore_buffers: expected tensors of buffers",
        "length: expected a multiple of 4 tokens for 2 ranks in the zigzag layout, got 7",
        "layout: expected one of",
        "method: expected one of",
    ]
    for said in worlds(2).run(messages):
        for text, part in zip(said, expected, strict=True):
            assert part in text


def kept(rank):
    x, y = torch.arange(8), torch.arange(8)
    with context_parallel(buffers=[x, y], buffer_seq_dims=[0, 0], no_restore_buffers=[y]):
        inside = x.tolist()
    return inside, x.tolist(), y.tolist()


def test_buffers(worlds):
    (mine, after, left), (_, _, other) = worlds(2).run(kept)
    assert mine == left == [0, 1, 6, 7]
    assert other == [2, 3, 4, 5]
    assert after == list(range(8))
