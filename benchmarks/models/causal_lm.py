"""Hugging Face's Llama and GPT-2 classes as training steps in bf16 autocast, from configurations.

    python -m warpwright bench --suite model llama_like_step gpt2_hf_step
    python -m warpwright bench --suite model llama_like_labels_step gpt2_hf_labels_step

The first two compute the loss from the logits, outside of what is compiled; the others pass
`labels=`, so that it is inside. Dropout is 0: the losses of all implementations are then comparable.

Needs transformers (`pip install transformers`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from warpwright.bench.steps import ROWS, Variant, Workload, fused_variant, swap_both

CAUSAL = "causal_flag"


def causal_flag_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Native attention with the flag in place of the mask, and K and V not repeated."""
    y = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return y.transpose(1, 2).contiguous(), None


def keep_the_flag(model: nn.Module, criterion: nn.Module) -> None:
    """Attention without a mask function: transformers then builds no mask, not even for padding."""
    ALL_ATTENTION_FUNCTIONS.register(CAUSAL, causal_flag_attention)
    model.set_attn_implementation(CAUSAL)  # type: ignore[operator]


def variants(peers: Sequence[str], device: str) -> list[Variant]:
    """Native as users have it and with the causal flag; ours eager, fused, compiled, captured."""
    found = [
        Variant("warpwright", ROWS, swap_both, patched=True),
        Variant("native", ROWS, peer="native"),
        fused_variant(ROWS),
    ]
    captured = device == "cuda" and "cudagraph" in peers
    if captured:
        found.append(Variant("cudagraph", ROWS, captured=True, peer="cudagraph"))
        found.append(Variant("warpwright_cudagraph", ROWS, swap_both, patched=True, captured=True))
        found.append(fused_variant(ROWS, captured=True))
    if "compile" in peers:
        compiled = {"compiled": True, "peer": "compile"}
        ours_compiled = replace(fused_variant(ROWS), impl="warpwright_compile", compiled=True)
        found += [
            Variant("compile", ROWS, **compiled),
            Variant("compile_causal", ROWS, keep_the_flag, **compiled),
            ours_compiled,
        ]
        if captured:
            found += [
                Variant("compile_causal_cudagraph", ROWS, keep_the_flag, captured=True, **compiled),
                replace(ours_compiled, impl="warpwright_compile_cudagraph", captured=True),
            ]
    return found


def variants_with_labels(peers: Sequence[str], device: str) -> list[Variant]:
    """Those that the place of the loss concerns."""
    wanted = ("warpwright", "native", "compile", "compile_causal", "warpwright_compile")
    return [v for v in variants(peers, device) if v.impl in wanted]


def _model(kind: Any, config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        # A copy: choosing an attention function writes into the model's configuration.
        model: nn.Module = kind(copy.deepcopy(config))
        # GPT-2's class name does not say it; the warning about that would break the graph.
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return model

    return build


def llama_like(device: str) -> tuple[Callable[[], nn.Module], int, int, int]:
    """(model, vocabulary, batch, length): 492 M parameters on a GPU, a small model on a CPU."""
    big = device == "cuda"
    config = transformers.LlamaConfig(
        vocab_size=32000 if big else 503,
        hidden_size=2048 if big else 64,
        intermediate_size=5632 if big else 160,
        num_hidden_layers=8 if big else 2,
        num_attention_heads=32 if big else 8,
        num_key_value_heads=8 if big else 2,
        max_position_embeddings=2048 if big else 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    batch, length = (4, 2048) if big else (2, 32)
    return _model(transformers.LlamaForCausalLM, config), config.vocab_size, batch, length


def gpt2(device: str) -> tuple[Callable[[], nn.Module], int, int, int]:
    """(model, vocabulary, batch, length): GPT-2 small, 124 M parameters, or a small model."""
    big = device == "cuda"
    config = transformers.GPT2Config(
        vocab_size=50257 if big else 503,
        n_positions=1024 if big else 64,
        n_embd=768 if big else 64,
        n_layer=12 if big else 2,
        n_head=12 if big else 4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    batch, length = (16, 1024) if big else (2, 32)
    return _model(transformers.GPT2LMHeadModel, config), config.vocab_size, batch, length


def _optimizer(parameters: object) -> torch.optim.Optimizer:
    # capturable: the step counts are on the GPU, so that a CUDA graph can hold the step.
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        lr=3e-4,
        weight_decay=0.1,
        fused=True,
        capturable=torch.cuda.is_available(),
    )


def loss(criterion: nn.Module, output: Any, target: Tensor) -> Tensor:
    return criterion(output.logits.flatten(0, 1), target.flatten())


def workloads(device: str) -> list[Workload]:
    found = []
    for name, build in (("llama_like", llama_like), ("gpt2_hf", gpt2)):
        model, vocabulary, batch, length = build(device)

        def text(
            vocabulary: int = vocabulary, batch: int = batch, length: int = length
        ) -> tuple[Tensor, Tensor]:
            tokens = torch.randint(0, vocabulary, (batch, length + 1))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        def text_and_labels(text: Callable[[], tuple[Tensor, Tensor]] = text) -> Any:
            tokens, _ = text()
            return tokens, tokens  # the model shifts its labels

        common: dict[str, Any] = {
            "case": f"b{batch} s{length}",
            "model": model,
            "optimizer": _optimizer,
            "dtype": torch.bfloat16 if device == "cuda" else torch.float32,
            "layouts": (ROWS,),
            "separate": True,
        }
        found.append(Workload(f"{name}_step", batch=text, loss=loss, variants=variants, **common))
        found.append(
            Workload(
                f"{name}_labels_step",
                batch=text_and_labels,
                call=lambda forward, inputs, labels: forward(*inputs, labels=labels),
                loss=lambda criterion, output, labels: output.loss,
                variants=variants_with_labels,
                **common,
            )
        )
    return found
