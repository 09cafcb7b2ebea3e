"""Tiny models of transformers, and what tests of them need."""

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import warpwright
from warpwright.testing import assert_as_good_as_native

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY = 64
LENGTH = 12
OP = "scaled_dot_product_attention"

# What attention is called with: (it has a mask, it is causal).
PLAIN = (False, True)
MASKED = (True, False)

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **IDS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOW = 5  # shorter than LENGTH
LAYERS = ["sliding_attention", "full_attention"]
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WHISPER_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

DECODERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "llama4": lambda: Llama4ForCausalLM(
        Llama4TextConfig(
            **GROUPED,
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "full_attention"],
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=LAYERS)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=LAYERS)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            **GPT2_SIZES,
            **IDS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED)),
}
OTHERS = {
    "bert": lambda: BertForMaskedLM(
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            **T5_SIZES,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
    ),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**WHISPER_SIZES, **IDS)),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
        )
    ),
}
MODELS = {**DECODERS, **OTHERS}
# Attention that transformers does not look up in its registry, or that ours cannot compute.
LEFT = {"gemma2"} | ({"bert", "t5"} if VERSION < (5, 0) else set())

# Tracing takes seconds for each model.
TRACED = [
    pytest.param(name, marks=() if name in ("llama", "gemma3", "gpt2") else pytest.mark.slow)
    for name in DECODERS
    if name not in LEFT
]


def make(name, device="cpu"):
    return MODELS[name]().to(device).train()


def tokens(device="cpu", length=LENGTH):
    """Two rows without special tokens."""
    return torch.randint(3, VOCABULARY, (2, length), device=device)


def padding(side, device="cpu"):
    """A mask whose first row has three tokens of padding."""
    mask = torch.ones(2, LENGTH, dtype=torch.long, device=device)
    mask[0, slice(0, 3) if side == "left" else slice(LENGTH - 3, None)] = 0
    return mask


def packed(device="cpu"):
    """Position ids of two sequences in each row."""
    ids = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
    return ids.expand(2, -1).to(device)


def without_a_loss(name):
    """transformers' losses log, which fullgraph=True refuses."""
    inputs = training_inputs(name)
    labels = inputs.pop("labels")
    if name in ("t5", "whisper"):
        inputs["decoder_input_ids"] = labels
    if name not in ("vit", "bert"):
        inputs["use_cache"] = False  # with checkpoints transformers logs that it does so
    return inputs


def training_inputs(name, device="cpu"):
    ids = tokens(device)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, device=device)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1], device=device)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20, device=device), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def results(model, **kwargs):
    """The logits, and the gradients of all parameters as one vector."""
    output = model(**kwargs)
    loss = output.logits.float().square().mean() if output.loss is None else output.loss
    found = torch.autograd.grad(loss, trained(model), allow_unused=True)
    return output.logits.detach(), torch.cat([g.flatten() for g in found if g is not None])


def as_double(kwargs):
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in kwargs.items()
    }


def assert_as_good(ours, native, run=results, **kwargs):
    """``run`` on our model, on the native one and on a copy of that in float64.

    The factor is that of ``swap(check=...)`` for a whole model.
    """
    found, expected = run(ours, **kwargs), run(native, **kwargs)
    exact = run(copy.deepcopy(native).double(), **as_double(kwargs))
    for a, b, e, what in zip(found, expected, exact, ("output", "gradients"), strict=True):
        assert_as_good_as_native(a, b, e, what, factor=4.0)


class Graphs:
    """A backend of torch.compile that keeps its graphs and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append(module)
        return module.forward

    def attention(self):
        """Of each call of our attention: (it has a mask, it is causal, heads of K)."""
        return [
            (
                node.args[3] is not None,
                node.args[5],
                node.args[1].meta["example_value"].shape[1],
            )
            for module in self.graphs
            for node in module.graph.nodes
            if node.op == "call_function"
            and node.target is getattr(torch.ops.warpwright, OP).default
        ]


def count_native(monkeypatch):
    """A list that grows by one for each call of native attention."""
    calls = []
    native = nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args)
        return native(*args, **kwargs)

    monkeypatch.setattr(nn.functional, OP, counted)
    return calls


def swapped_copy(model, **kwargs):
    """A swapped deep copy, and the report."""
    mine = copy.deepcopy(model)
    return mine, warpwright.swap(mine, **kwargs)


def assert_opens_in_a_new_process(model, path, condition):
    """A file of ``model`` gives equal logits in a process that has not imported us; ``condition``: of ``model``."""
    ids = tokens()
    torch.save((model, ids, model(ids).logits.detach()), path)
    code = (
        "import sys, torch\n"
        "model, ids, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.testing.assert_close(model(ids).logits, expected)\n"
        f"assert {condition}\n"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)


def attention_entries(report):
    return [e for e in report.entries if e.op == OP]
