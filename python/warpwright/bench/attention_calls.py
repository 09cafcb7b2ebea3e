"""How a training step calls attention: by which op, with the causal flag or a mask, and its FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .guards import quiet_profiler

# op -> (place of the mask among its arguments or None, place of the causal flag)
OPS: dict[str, tuple[int | None, int]] = {
    "warpwright::attention": (3, 5),
    "aten::_scaled_dot_product_flash_attention": (None, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (5, 4),
    "aten::_scaled_dot_product_efficient_attention": (3, 6),
    "aten::_scaled_dot_product_cudnn_attention": (3, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable": (3, 5),
    "aten::_scaled_dot_product_attention_math": (3, 5),
}
MASK = "mask "  # how a description of a call with one goes on after the op's name


def attention_calls(step: Callable[[], Any]) -> list[str]:
    """Profiles one step; one line per kind of call, the number of calls first."""
    activities = [ProfilerActivity.CPU]
    with (
        quiet_profiler(),
        profile(activities=activities, record_shapes=True, acc_events=True) as profiler,
    ):
        step()
    found: Counter[str] = Counter()
    for event in profiler.events():
        # An op that autograd calls once more below itself is one call. The profiler merges the two
        # events only if the outer one has no other child.
        is_inner = event.cpu_parent is not None and event.cpu_parent.name == event.name
        if event.name in OPS and not is_inner:
            found[_described(event.name, event.input_shapes, event.concrete_inputs)] += 1
    return [f"{count} x {what}" for what, count in found.items()]


def _described(name: str, shapes: list[list[int]], values: list[Any]) -> str:
    mask_at, causal_at = OPS[name]
    mask = shapes[mask_at] if mask_at is not None else []
    causal = "causal flag" if values[causal_at] else "no causal flag"
    how = f"{MASK}{'x'.join(map(str, mask))}" if mask else "no mask"
    return f"{name}: {causal}, {how}, {shapes[0][-3]} heads of {shapes[1][-3]}"


def masked(calls: list[str]) -> bool:
    """Whether any of these calls got a mask."""
    return any(f", {MASK}" in call for call in calls)


Shape = torch.Size


def _forward_flops(
    query: Shape, key: Shape, value: Shape, *rest: Any, out_shape: Any = None, **options: Any
) -> int:
    """Both products; the whole square, even with the causal flag."""
    *heads, rows, width = query
    return int(2 * math.prod(heads) * rows * key[-2] * (width + value[-1]))


def _backward_flops(
    grad: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **options: Any
) -> int:
    """Five products; one computes the scores again."""
    return 5 * _forward_flops(query, key, value) // 2


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """For FlopCounterMode, whose own formulas refuse fewer heads of key than of query."""
    found: dict[Any, Callable[..., int]] = {}
    for name in OPS:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op)
        if namespace == "aten" and not op.endswith("math"):  # that one calls products
            found[packet] = _forward_flops
            found[getattr(torch.ops.aten, f"{op}_backward")] = _backward_flops
    return found
