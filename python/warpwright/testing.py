"""How we judge a result: error against float64, not worse than native's own.

The rule (docs/numerics.md): max|ours - exact| <= 1.5 * max|native - exact| + 1 ulp of max|exact| in
the output's dtype, NaN and infinities at the same places, same dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ERROR_FACTOR = 1.5

__all__ = [
    "ERROR_FACTOR",
    "assert_as_good_as_native",
    "assert_same",
    "compare_with_native",
    "max_error",
    "to_double",
]


def to_double(value: Any) -> Any:
    """Floating and complex tensors of a nested structure as detached, contiguous 64-bit copies.

    Contiguous, because native is the oracle and its CUDA batch norm loses the update of running
    statistics that are not.
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        dtype = torch.complex128 if leaf.is_complex() else torch.float64
        double = leaf.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        return double.requires_grad_(leaf.requires_grad)

    return tree_map(convert, value)


def strides_are_defined(inputs: Any) -> bool:
    """Whether native's output strides for ``inputs`` are a rule, not a habit of one of its kernels.

    For tensors in neither of the two memory formats its CPU and CUDA kernels differ from each other
    (ours follow the CPU's on both); its CUDA convolution of float64 has no channels_last.
    """
    for tensor in (t for t in tree_leaves(inputs) if isinstance(t, Tensor)):
        standard = tensor.dtype != torch.float64 and (
            tensor.is_contiguous()
            or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        )
        if tensor.device.type == "cuda" and not standard:
            return False
    return True


def max_error(value: Tensor, exact: Tensor) -> float:
    """Largest |value - exact| over the finite elements of ``exact``; 0 for an empty tensor."""
    difference = (value.detach().double() - exact.detach().double())[torch.isfinite(exact)]
    return float(difference.abs().max()) if difference.numel() else 0.0


def _non_finite(value: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return value.isposinf() * 1 + value.isneginf() * 2 + value.isnan() * 3


def assert_as_good_as_native(
    ours: Tensor, native: Tensor, exact: Tensor, what: str = "result", factor: float = ERROR_FACTOR
) -> None:
    """Applies the error rule; ``exact`` is the same computation in float64."""
    assert ours.shape == native.shape, f"{what}: shape {ours.shape}, native {native.shape}"
    assert ours.dtype == native.dtype, f"{what}: dtype {ours.dtype}, native {native.dtype}"
    if not ours.is_floating_point():
        assert torch.equal(ours, native), f"{what}: integer values differ from native"
        return
    assert torch.equal(_non_finite(ours), _non_finite(native)), f"{what}: NaN or inf elsewhere"
    exact = exact.detach()
    finite = exact[torch.isfinite(exact)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    # The float64 oracle is native itself: two right orders of K sums differ by about sqrt(K) ulps.
    ulps = 64 if ours.dtype == torch.float64 else 1
    ulp = torch.finfo(ours.dtype).eps * scale * ulps
    error, native_error = max_error(ours, exact), max_error(native, exact)
    bound = factor * native_error + ulp
    assert error <= bound, (
        f"{what}: max error {error:.3e} against float64, allowed {bound:.3e} "
        f"(native: {native_error:.3e})"
    )


def assert_same(ours: Any, native: Any, what: str = "result") -> None:
    """Bit equality (NaN equals NaN, -0.0 differs from 0.0), and the same dtype and shape."""
    assert type(ours) is type(native) or isinstance(ours, Tensor), f"{what}: {type(ours)}"
    if isinstance(ours, (tuple, list)):
        assert len(ours) == len(native)
        for i, (a, b) in enumerate(zip(ours, native, strict=True)):
            assert_same(a, b, f"{what}[{i}]")
        return
    assert ours.dtype == native.dtype, f"{what}: dtype {ours.dtype}, native {native.dtype}"
    assert ours.shape == native.shape, f"{what}: shape {ours.shape}, native {native.shape}"
    same = torch.equal(torch.nan_to_num(ours, 7.5), torch.nan_to_num(native, 7.5))
    if ours.is_floating_point():
        same = same and torch.equal(ours.isnan(), native.isnan())
        keep = ~ours.isnan()
        same = same and torch.equal(torch.signbit(ours)[keep], torch.signbit(native)[keep])
    assert same, f"{what}: bits differ from native"


def compare_with_native(
    ours: Callable[..., Tensor],
    native: Callable[..., Tensor],
    inputs: Iterable[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    factor: float = ERROR_FACTOR,
) -> None:
    """Runs both forward and backward on ``inputs`` and applies the error rule to every result.

    Gradients are taken for each floating input that requires grad, with one random cotangent that
    all three runs (ours, native, native in float64) share.
    """
    kwargs = kwargs or {}
    inputs = tuple(inputs)

    def run(function: Callable[..., Tensor], args: Any, kw: Any, cotangent: Tensor | None) -> Any:
        output = function(*args, **kw)
        leaves = [a for a in (*args, *kw.values()) if isinstance(a, Tensor) and a.requires_grad]
        if not leaves:
            return output, [], cotangent
        if cotangent is None:
            cotangent = torch.randn_like(output)
        grads = torch.autograd.grad(
            output, leaves, cotangent.to(output.dtype), allow_unused=True, retain_graph=False
        )
        return output, list(grads), cotangent

    native_out, native_grads, cotangent = run(native, inputs, kwargs, None)
    our_out, our_grads, _ = run(ours, inputs, kwargs, cotangent)
    exact_out, exact_grads, _ = run(native, to_double(inputs), to_double(kwargs), cotangent)
    assert_as_good_as_native(our_out, native_out, exact_out, "output", factor)
    if our_out.numel() and strides_are_defined(inputs):
        assert our_out.stride() == native_out.stride(), (
            f"output: strides {our_out.stride()}, native {native_out.stride()}"
        )
    for i, (a, b, e) in enumerate(zip(our_grads, native_grads, exact_grads, strict=True)):
        assert (a is None) == (b is None), f"gradient {i}: present in one of ours and native only"
        if a is not None:
            assert_as_good_as_native(a, b, e, f"gradient {i}", factor)
