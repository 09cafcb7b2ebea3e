"""Hugging Face's BERT-base and T5-small as training steps in bf16 autocast, from configurations.

    python -m warpwright bench --suite model bert_base_step t5_small_step

BERT predicts masked words (every position has a label here); T5 predicts a target text. Dropout is
0: the losses of all implementations are then comparable.

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

from warpwright.bench.steps import ROWS, Variant, Workload, fused_variant, swap_both


def variants(peers: Sequence[str], device: str) -> list[Variant]:
    """Native and compiled; ours eager, fused, compiled and captured."""
    found = [
        Variant("warpwright", ROWS, swap_both, patched=True),
        Variant("native", ROWS, peer="native"),
        fused_variant(ROWS),
    ]
    if device == "cuda" and "cudagraph" in peers:
        found += [
            Variant("cudagraph", ROWS, captured=True, peer="cudagraph"),
            fused_variant(ROWS, captured=True),
        ]
    if "compile" in peers:
        found += [
            Variant("compile", ROWS, compiled=True, peer="compile"),
            replace(fused_variant(ROWS), impl="warpwright_compile", compiled=True),
        ]
    return found


def bert(device: str) -> tuple[Callable[[], nn.Module], int, int, int]:
    """(model, vocabulary, batch, length): BERT-base, 110 M parameters, or a small model."""
    big = device == "cuda"
    config = transformers.BertConfig(
        vocab_size=30522 if big else 503,
        hidden_size=768 if big else 64,
        num_hidden_layers=12 if big else 2,
        num_attention_heads=12 if big else 4,
        intermediate_size=3072 if big else 128,
        max_position_embeddings=512 if big else 64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    batch, length = (32, 512) if big else (2, 32)
    return _model(transformers.BertForMaskedLM, config), config.vocab_size, batch, length


def t5(device: str) -> tuple[Callable[[], nn.Module], int, int, int]:
    """(model, vocabulary, batch, length): T5-small, 60 M parameters, or a small model."""
    big = device == "cuda"
    config = transformers.T5Config(
        vocab_size=32128 if big else 503,
        d_model=512 if big else 64,
        d_kv=64 if big else 16,
        d_ff=2048 if big else 128,
        num_layers=6 if big else 2,
        num_heads=8 if big else 4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    batch, length = (32, 512) if big else (2, 32)
    return _model(transformers.T5ForConditionalGeneration, config), config.vocab_size, batch, length


def _model(kind: Any, config: Any) -> Callable[[], nn.Module]:
    # A copy: choosing an attention function writes into the model's configuration.
    return lambda: kind(copy.deepcopy(config))


def _optimizer(parameters: object) -> torch.optim.Optimizer:
    # capturable: the step counts are on the GPU, so that a CUDA graph can hold the step.
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        lr=3e-4,
        fused=True,
        capturable=torch.cuda.is_available(),
    )


def loss(criterion: nn.Module, output: Any, target: Tensor) -> Tensor:
    return criterion(output.logits.flatten(0, 1), target.flatten())


def workloads(device: str) -> list[Workload]:
    found = []
    for name, build in (("bert_base", bert), ("t5_small", t5)):
        model, vocabulary, batch, length = build(device)
        texts = 3 if name == "t5_small" else 2  # the encoder's, the decoder's, the target

        def text(
            vocabulary: int = vocabulary, batch: int = batch, length: int = length, n: int = texts
        ) -> tuple[Tensor, ...]:
            return tuple(torch.randint(1, vocabulary, (batch, length)) for _ in range(n))

        def call(forward: Any, inputs: list[Tensor], target: Tensor) -> Any:
            if len(inputs) == 1:
                return forward(input_ids=inputs[0])
            return forward(input_ids=inputs[0], decoder_input_ids=inputs[1])

        found.append(
            Workload(
                f"{name}_step",
                f"b{batch} s{length}",
                model,
                text,
                loss=loss,
                call=call,
                optimizer=_optimizer,
                dtype=torch.bfloat16 if device == "cuda" else torch.float32,
                layouts=(ROWS,),
                variants=variants,
                separate=True,
            )
        )
    return found
