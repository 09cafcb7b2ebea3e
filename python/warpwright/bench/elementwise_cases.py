"""Cases of relu and the other activations: large tensors, and sizes off a multiple of a vector."""

from __future__ import annotations

import torch

from .. import _work
from .cases import BF16, FP32, ROWS, Case, _randn, _relu


def _activation(op: str, numel: int, dtype: torch.dtype) -> Case:
    return Case(
        op,
        f"{numel}",
        dtype,
        ROWS,
        lambda device: {"x": _randn((numel,), dtype, device)},
        lambda F, i: getattr(F, op)(i["x"]),
        _work.traffic(numel * dtype.itemsize, 2, 3).of("bytes"),
    )


OPS = ("gelu", "silu", "sigmoid", "tanh")
ELEMENTWISE = [
    *(_relu(numel, BF16) for numel in (1 << 28, 100_000_007)),
    *(_relu(numel, FP32) for numel in (1 << 27, 50_331_653)),
    *(_activation(op, 1 << 28, BF16) for op in OPS),
    *(_activation(op, 1 << 27, FP32) for op in OPS),
]
SMALL_ELEMENTWISE = [_relu(1 << 22, FP32), *(_activation(op, 1 << 20, FP32) for op in OPS)]
