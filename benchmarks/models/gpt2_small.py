"""GPT-2 small (124 M parameters) in plain nn modules, as a training step in bf16 autocast.

python -m warpwright bench --suite model gpt2_small_step
python -m warpwright profile benchmarks/models/gpt2_small.py:training
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpwright.bench.steps import ROWS, Workload


@dataclass(frozen=True)
class Config:
    vocabulary: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight  # tied, as in the original

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def _optimizer(parameters: object) -> torch.optim.Optimizer:
    # capturable: the step counts are on the GPU, so that a CUDA graph can hold the step.
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        lr=6e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
        capturable=torch.cuda.is_available(),
    )


def loss(criterion: nn.Module, logits: Tensor, target: Tensor) -> Tensor:
    return criterion(logits.flatten(0, 1), target.flatten())


def _size(device: str) -> tuple[Config, int, int]:
    """Configuration, batch and length: the real model on a GPU, a small one on a CPU."""
    if device == "cuda":
        return Config(), 16, 1024
    return Config(vocabulary=5003, context=128, layers=2, heads=4, width=128), 2, 64


def workloads(device: str) -> list[Workload]:
    config, batch, length = _size(device)

    def tokens() -> tuple[Tensor, Tensor]:
        text = torch.randint(0, config.vocabulary, (batch, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return [
        Workload(
            "gpt2_small_step",
            f"b{batch} s{length}",
            lambda: GPT(config),
            tokens,
            loss=loss,
            optimizer=_optimizer,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            layouts=(ROWS,),
        )
    ]


def training(
    device: str = "cpu", batch: int | None = None, length: int | None = None
) -> dict[str, object]:
    config, default_batch, default_length = _size(device)
    batch, length = batch or default_batch, length or default_length
    model = GPT(config).to(device)
    text = torch.randint(0, config.vocabulary, (batch, length + 1), device=device)
    return {
        "model": model,
        "inputs": (text[:, :-1].contiguous(),),
        "target": text[:, 1:].contiguous(),
        "loss": lambda logits, target: loss(nn.CrossEntropyLoss(), logits, target),
        "optimizer": _optimizer(model.parameters()),
        "autocast": torch.bfloat16 if device == "cuda" else None,
    }
