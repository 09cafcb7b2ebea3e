"""Optimizer steps over the parameters of known models; native's peer is its fused kernel.

Bytes: parameter and gradient read, parameter written, and each state read and written.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import guards
from .measure import interleaved, peak_mib
from .peers import OURS
from .records import memory_tbs
from .steps import capture

Row = dict[str, Any]
Shapes = list[tuple[int, ...]]


def resnet50_shapes() -> Shapes:
    """The 161 parameters of torchvision's ResNet-50."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, channels, k in (
                (inner, width, 1),
                (inner, inner, 3),
                (4 * inner, inner, 1),
            ):
                shapes += [(out, channels, k, k), (out,), (out,)]
            if block == 0:
                shapes += [(4 * inner, width, 1, 1), (4 * inner,), (4 * inner,)]
            width = 4 * inner
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_shapes(width: int = 768, layers: int = 12) -> Shapes:
    """The 148 parameters of GPT-2 small, its head tied to the token embedding."""
    shapes: Shapes = [(50257, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width)]
        shapes += [(width,)]
    return [*shapes, (width,), (width,)]


@dataclass(frozen=True)
class OptimizerCase:
    """`build(module, parameters)` makes the optimizer of torch.optim or warpwright.optim."""

    op: str
    case: str
    shapes: Shapes
    build: Callable[[Any, list[Tensor]], torch.optim.Optimizer]
    states: int  # tensors of state per parameter
    dtype: torch.dtype = torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        numel = sum(torch.Size(shape).numel() for shape in self.shapes)
        return numel * self.dtype.itemsize * (3 + 2 * self.states)


def available() -> bool:
    return importlib.util.find_spec("warpwright.optim") is not None


def optimizer_cases(suite: str) -> list[OptimizerCase]:
    """None if this build has no optimizers."""
    if not available():
        return []
    models = {"resnet50 25.6M in 161": resnet50_shapes(), "gpt2 124M in 148": gpt2_shapes()}
    if suite == "quick":
        models = {"1.5M in 40": [(192, 192), (192,)] * 20 + [(1000, 768)]}
    found = []
    for name, shapes in models.items():
        found += [
            OptimizerCase(
                "sgd", name, shapes, lambda o, p: o.SGD(p, lr=1e-3, fused=True), states=0
            ),
            OptimizerCase(
                "sgd",
                f"momentum {name}",
                shapes,
                lambda o, p: o.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True),
                states=1,
            ),
            OptimizerCase(
                "adamw",
                name,
                shapes,
                lambda o, p: o.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True, capturable=True),
                states=2,
            ),
        ]
    return found


def _parameters(case: OptimizerCase, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    parameters: list[Tensor] = []
    for shape in case.shapes:
        p = nn.Parameter(torch.randn(shape, device=device).to(case.dtype))
        p.grad = torch.randn(shape, device=device).to(case.dtype)
        parameters.append(p)
    return parameters


def _error(case: OptimizerCase, module: Any, device: str, exact: list[Tensor] | None) -> Any:
    """Parameters after three steps: the largest error over the largest update, or the exact ones."""
    parameters = _parameters(case, device)
    if exact is None:
        doubles = [nn.Parameter(p.detach().double()) for p in parameters]
        for d, p in zip(doubles, parameters, strict=True):
            assert p.grad is not None
            d.grad = p.grad.double()
        parameters = list(doubles)
    optimizer = case.build(module, parameters)
    for _ in range(3):
        optimizer.step()
    if exact is None:
        return [p.detach() for p in parameters]
    return max(guards.relative(p.detach(), e) for p, e in zip(parameters, exact, strict=True))


def optimizer_rows(
    case: OptimizerCase,
    device: str,
    ceilings: dict[str, Any],
    seconds: float,
    clocks: guards.Clocks | None = None,
) -> list[Row]:
    optim: Any = importlib.import_module("warpwright.optim")
    modules = {OURS.name: optim, "native": torch.optim}
    exact = _error(case, torch.optim, device, None)
    errors = {name: _error(case, module, device, exact) for name, module in modules.items()}
    steps: dict[str, Callable[[], Any]] = {
        name: case.build(module, _parameters(case, device)).step for name, module in modules.items()
    }
    if device == "cuda":  # captured: Python takes longer for a step than a small model's kernels
        steps = {name: capture(step) for name, step in steps.items()}
    start = time.monotonic()
    timings = interleaved(steps, device, seconds)
    return [
        {
            "op": case.op,
            "case": case.case,
            "dtype": case.dtype_name,
            "layout": "rows",
            "pass": "step",
            "impl": name,
            **timing.fields(timings[OURS.name], name == OURS.name),
            "bytes": case.bytes,
            "flops": 0,
            "floor_ms": round(case.bytes / memory_tbs(ceilings, case.bytes) / 1e9, 5),
            "peak_mib": peak_mib(steps[name], device),
            "err": errors[name],
            "err_native": errors["native"],
            "agrees": errors[name] <= guards.SLACK * errors["native"] + 1e-6,
            **(clocks.since(start) if clocks else {}),
        }
        for name, timing in timings.items()
    ]
