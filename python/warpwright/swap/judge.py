"""The error rule of ``check=``: when a result is as accurate as native's.

Errors are measured against a float64 copy. The L2 norm of ours may be 1.5 x native's (+ 1 ulp). The
maximum may be 4 x native's (+ 4 ulp), because over a model's many layers one maximum is likely to be
large by chance. In two cases native's error and the result's ulp are no fair bound:

- TF32 is allowed, but native runs a few shapes in full float32. Native's error then counts as at least
  TF32's: that of the same layer in float64 with the operands of its products rounded to TF32. Sums of
  two TF32 numbers are measured the same way, with operands of 20 bits.
- A running mean is a sum that cancels, often to a thousandth of its terms. Its ulp is that of the
  batch's root mean square.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..testing import ERROR_FACTOR

MAX_FACTOR = 4.0
MODEL_FACTOR = 4.0
# Relative L2 that the whole model may move in any case, by the lowest precision in it. One flipped
# ReLU moved a ResNet-18's gradients by 1e-2 in a batch of two images.
MODEL_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 5e-2,
    torch.float16: 2e-1,
    torch.bfloat16: 2e-1,
}

Call = tuple[tuple[Any, ...], dict[str, Any]]

# name -> tensor; grads are None where the loss does not depend on the leaf
Run = dict[str, dict[str, Tensor | None]]


def _norms(value: Tensor, exact: Tensor) -> tuple[float, float]:
    """L2 norm and maximum of value - exact, over the finite elements of exact."""
    difference = (value.double() - exact.double())[torch.isfinite(exact)]
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.norm()), float(difference.abs().max())


def mean_terms(module: nn.Module, call: Call) -> Tensor | None:
    """The size of a running mean's terms: each channel's root mean square times momentum."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.running_mean is None:
        return None
    args, kwargs = call
    x = (args[0] if args else kwargs["input"]).detach().double()
    momentum = module.momentum
    if momentum is None:
        momentum = 1 / (int(module.num_batches_tracked or 0) + 1)
    return x.pow(2).mean([d for d in range(x.dim()) if d != 1]).sqrt() * momentum


def judge(
    ours: Tensor,
    native: Tensor,
    exact: Tensor,
    allowed: Tensor,
    terms: Tensor | None,
    jumps: bool,
) -> tuple[str, float, float]:
    """The fault of ``ours`` ("" if none), its relative L2 error and native's.

    Args:
        allowed: a result whose error is fair in any case.
        terms: the terms of a sum that cancels.
        jumps: rounding may change a decision that this gradient depends on.
    """
    if ours.shape != native.shape or ours.dtype != native.dtype:
        return (
            f"{tuple(ours.shape)} {ours.dtype}, native {tuple(native.shape)} {native.dtype}",
            0,
            0,
        )
    if not ours.is_floating_point():
        return ("" if torch.equal(ours, native) else "integer values differ"), 0, 0
    if not torch.equal(torch.isfinite(ours), torch.isfinite(native)):
        return "NaN or inf elsewhere than native", float("inf"), 0
    zero = torch.zeros_like(exact)
    scale_l2, scale_max = _norms(exact, zero)
    (our_l2, our_max), (native_l2, native_max) = _norms(ours, exact), _norms(native, exact)
    fair_l2, fair_max = _norms(allowed, exact)
    fair_l2, fair_max = max(native_l2, fair_l2), max(native_max, fair_max)
    # In float64 the oracle is native itself: allow the difference of a long sum in another order.
    ulp = torch.finfo(ours.dtype).eps * (1024 if ours.dtype == torch.float64 else 1)
    relative = 1 / scale_l2 if scale_l2 > 0 else 1.0
    numbers = (our_l2 * relative, native_l2 * relative)
    if terms is not None:
        terms_l2, terms_max = _norms(terms, torch.zeros_like(terms))
        scale_l2, scale_max = max(scale_l2, terms_l2), max(scale_max, terms_max)
    bound_l2 = ERROR_FACTOR * fair_l2 + ulp * scale_l2
    bound_max = MAX_FACTOR * (fair_max + ulp * scale_max)
    if jumps:
        bound_l2, bound_max = max(bound_l2, MODEL_TOLERANCE[ours.dtype] * scale_l2), float("inf")
    if our_l2 > bound_l2:
        return (
            f"relative error {numbers[0]:.3e}, allowed {bound_l2 * relative:.3e} "
            f"(native: {numbers[1]:.3e})",
            *numbers,
        )
    if our_max > bound_max:
        return (
            f"max error {our_max:.3e}, allowed {bound_max:.3e} (native: {native_max:.3e})",
            *numbers,
        )
    return "", *numbers


def _distance(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> float:
    """Relative L2 distance of two sets of tensors, each as one vector."""
    square = norm = 0.0
    for key, other in b.items():
        value = a[key]
        if value is None or other is None or not other.is_floating_point():
            continue
        difference, _ = _norms(value, other)
        size, _ = _norms(other, torch.zeros_like(other))
        square, norm = square + difference**2, norm + size**2
    return (square / norm) ** 0.5 if norm > 0 else square**0.5


def compare_runs(
    ours: Run, native: Run, exact: Run | None, dtypes: set[torch.dtype]
) -> tuple[dict[str, Any], list[str]]:
    tolerance = max((MODEL_TOLERANCE[d] for d in dtypes if d in MODEL_TOLERANCE), default=5e-2)
    whole: dict[str, Any] = {"loss": _scalar(ours), "native_loss": _scalar(native)}
    lines = []
    # A float64 run whose output is far from native's took another path (random numbers of dropout).
    # Gradients cannot tell: in bfloat16 native's own may be off by a third.
    if exact is not None and _distance(native["output"], exact["output"]) >= 0.1:
        exact = None
    for part in ("loss", "output", "gradients", "buffers"):
        present = {k for k, v in ours[part].items() if v is not None}
        expected = {k for k, v in native[part].items() if v is not None}
        if present != expected:
            lines.append(f"model: {part}: differs in {sorted(present ^ expected)[:5]}")
            continue
        whole[part + "_distance"] = distance = _distance(ours[part], native[part])
        allowed = tolerance
        if exact is not None:
            whole[part + "_native_error"] = native_error = _distance(native[part], exact[part])
            whole[part + "_error"] = distance = _distance(ours[part], exact[part])
            allowed = max(tolerance, MODEL_FACTOR * native_error)
        # not <=: NaN on one side only
        nan = any(
            not torch.equal(torch.isnan(v), torch.isnan(native[part][k]))  # type: ignore[arg-type]
            for k, v in ours[part].items()
            if v is not None and v.is_floating_point()
        )
        if nan or distance > allowed:
            lines.append(
                f"model: {part}: relative difference {distance:.3e}, allowed {allowed:.3e}"
                + (", NaN elsewhere than native" if nan else "")
            )
    return whole, lines


def _scalar(run: Run) -> float:
    loss = run["loss"]["loss"]
    assert loss is not None
    return float(loss)
