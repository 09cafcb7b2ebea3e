"""The error rule: error against float64, not worse than native's.

The rule (docs/numerics.md): ``max|ours - exact| <= 1.5 * max|native - exact| + 1 ulp of max|exact|``
in the output's dtype; NaN and infinities at the same positions; same dtype and shape.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

#: How much larger than native's error ours may be.
ERROR_FACTOR = 1.5
#: Nearby inputs whose mean errors decide if a result exceeds the bound.
DRAWS = 32
#: Elements up to which results of a GPU are compared on the CPU.
SMALL = 2**16

__all__ = [
    "DRAWS",
    "ERROR_FACTOR",
    "assert_as_good_as_native",
    "assert_same",
    "compare_with_native",
    "max_error",
    "to_double",
]


def to_double(value: Any) -> Any:
    """Floating and complex tensors of a nested structure as detached, contiguous 64-bit copies.

    Contiguous, because native is the oracle, and its CUDA batch norm loses the update of running
    statistics that are not contiguous.
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

    For tensors in neither of the two memory formats native's CPU and CUDA kernels differ from each
    other. Ours follow the CPU's on both. Native's CUDA convolution of float64 has no channels_last.
    """
    for tensor in (t for t in tree_leaves(inputs) if isinstance(t, Tensor)):
        standard = tensor.dtype != torch.float64 and (
            tensor.is_contiguous()
            or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        )
        if tensor.device.type == "cuda" and not standard:
            return False
    return True


def small_on_cpu(*results: Tensor) -> tuple[Tensor, ...]:
    """``results`` on the CPU if all are small: one copy each, and no wait for the GPU per check."""
    if all(type(t) is Tensor and t.is_cuda and t.numel() <= SMALL for t in results):
        return tuple(t.detach().cpu() for t in results)
    return results


def max_error(value: Tensor, exact: Tensor) -> float:
    """Largest ``|value - exact|`` over the finite elements of ``exact``; 0 for an empty tensor."""
    difference = (value.detach().double() - exact.detach().double())[torch.isfinite(exact)]
    return float(difference.abs().max()) if difference.numel() else 0.0


def _non_finite(value: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return value.isposinf() * 1 + value.isneginf() * 2 + value.isnan() * 3


def _assert_alike(ours: Tensor, native: Tensor, what: str) -> None:
    """Everything but rounding: shape, dtype, integers, NaN and infinities."""
    assert ours.shape == native.shape, f"{what}: shape {ours.shape}, native {native.shape}"
    assert ours.dtype == native.dtype, f"{what}: dtype {ours.dtype}, native {native.dtype}"
    if ours.is_floating_point():
        assert torch.equal(_non_finite(ours), _non_finite(native)), f"{what}: NaN or inf elsewhere"
    else:
        assert torch.equal(ours, native), f"{what}: integer values differ from native"


@dataclass
class _Errors:
    """Against float64; of several inputs, their mean."""

    ours: float
    native: float
    ulp: float  # of the largest result, as many as the dtype is allowed

    @classmethod
    def of(cls, ours: Tensor, native: Tensor, exact: Tensor) -> _Errors:
        finite = exact.detach()[torch.isfinite(exact)]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        # The float64 oracle is native itself: two right orders of K sums differ by about sqrt(K)
        # ulps.
        ulps = 64 if ours.dtype == torch.float64 else 1
        ulp = torch.finfo(ours.dtype).eps * scale * ulps
        return cls(max_error(ours, exact), max_error(native, exact), ulp)

    @classmethod
    def mean(cls, draws: Sequence[_Errors]) -> _Errors:
        return cls(*(statistics.fmean(values) for values in zip(*map(astuple, draws), strict=True)))

    def within(self, factor: float) -> bool:
        return self.ours <= factor * self.native + self.ulp

    def check(self, what: str, factor: float) -> None:
        assert self.within(factor), (
            f"{what}: max error {self.ours:.3e} against float64, allowed "
            f"{factor * self.native + self.ulp:.3e} (native: {self.native:.3e})"
        )


def assert_as_good_as_native(
    ours: Tensor, native: Tensor, exact: Tensor, what: str = "result", factor: float = ERROR_FACTOR
) -> None:
    """Applies the error rule; ``exact`` is the same computation in float64."""
    ours, native, exact = small_on_cpu(ours, native, exact)
    _assert_alike(ours, native, what)
    if ours.is_floating_point():
        _Errors.of(ours, native, exact).check(what, factor)


@contextlib.contextmanager
def _nearby(values: Any) -> Iterator[Callable[[], None]]:
    """Gives a function that multiplies each floating element in place by 1 +- 1/16, at random.

    In place of its whole storage, so that strides, overlaps and alignment stay. Afterwards the
    elements are what they were.
    """
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]
    storages = {
        t.untyped_storage().data_ptr(): t.detach().as_strided(
            (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0
        )
        for t in tensors
    }
    saved = {key: flat.clone() for key, flat in storages.items()}

    def draw() -> None:
        for key, flat in storages.items():
            flat.copy_(saved[key]).mul_(torch.empty_like(flat).uniform_(15 / 16, 17 / 16))

    try:
        yield draw
    finally:
        for key, flat in storages.items():
            flat.copy_(saved[key])


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
    ours, native = small_on_cpu(ours, native)
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
    all three runs (ours, native, native in float64) share. Of a result that exceeds the bound the
    mean errors over ``DRAWS`` nearby inputs decide.
    """
    if isinstance(inputs, Tensor) or not isinstance(inputs, Iterable):
        got = type(inputs).__name__
        raise TypeError(f"inputs: expected a tuple of both functions' arguments, got {got}")
    kwargs = kwargs or {}
    inputs = tuple(inputs)

    def run(function: Callable[..., Tensor], args: Any, kw: Any, cotangent: Tensor | None) -> Any:
        output = function(*args, **kw)
        leaves = [a for a in (*args, *kw.values()) if isinstance(a, Tensor) and a.requires_grad]
        if not leaves:
            return [output], cotangent
        if cotangent is None:
            cotangent = torch.randn_like(output)
        grads = torch.autograd.grad(
            output, leaves, cotangent.to(output.dtype), allow_unused=True, retain_graph=False
        )
        return [output, *grads], cotangent

    def draw() -> dict[str, _Errors]:
        """The errors of each floating result; what has nothing to do with rounding is checked."""
        theirs, cotangent = run(native, inputs, kwargs, None)
        found, _ = run(ours, inputs, kwargs, cotangent)
        exact, _ = run(native, to_double(inputs), to_double(kwargs), cotangent)
        errors = {}
        for i, (a, b, e) in enumerate(zip(found, theirs, exact, strict=True)):
            what = f"gradient {i - 1}" if i else "output"
            assert (a is None) == (b is None), f"{what}: present in one of ours and native only"
            if a is None:
                continue
            result, native_result, exact_result = small_on_cpu(a.detach(), b.detach(), e.detach())
            _assert_alike(result, native_result, what)
            if a.is_floating_point():
                errors[what] = _Errors.of(result, native_result, exact_result)
            if i == 0 and a.numel() and strides_are_defined(inputs):
                assert a.stride() == b.stride(), (
                    f"{what}: strides {a.stride()}, native {b.stride()}"
                )
        return errors

    first = draw()
    exceeded = [what for what, errors in first.items() if not errors.within(factor)]
    if not exceeded:
        return
    draws = [first]
    with _nearby((inputs, kwargs)) as move:
        while len(draws) < DRAWS:
            move()
            draws.append(draw())
    for what in exceeded:
        _Errors.mean([d[what] for d in draws]).check(f"{what}, mean of {DRAWS} inputs", factor)
