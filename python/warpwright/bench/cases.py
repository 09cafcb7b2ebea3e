"""How a case of each op is made, with the fewest bytes and FLOPs of each pass; shapes.py lists them.

E below is the bytes of the activation tensor. "bytes" counts every input once and every output
once; "flops" counts multiply and add as two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import _work
from .._precision import get_float32_matmul_precision, set_float32_matmul_precision
from .measure import tf32_allowed

Inputs = dict[str, Any]
Outputs = Any  # a tensor, or a tuple of tensors

BF16, FP32 = torch.bfloat16, torch.float32
NHWC, NCHW, ROWS = "nhwc", "nchw", "rows"


def joined(outputs: Outputs) -> Tensor:
    """One tensor for comparisons: of several outputs all elements, one after another."""
    if isinstance(outputs, Tensor):
        return outputs
    return torch.cat([output.flatten() for output in outputs])


@dataclass(frozen=True)
class Case:
    """One workload; `call(F, inputs)` runs it with F = warpwright.functional or torch's."""

    op: str
    case: str
    dtype: torch.dtype
    layout: str
    make: Callable[[str], Inputs]
    call: Callable[[Any, Inputs], Outputs]
    bytes: dict[str, float]
    flops: dict[str, float] = field(default_factory=dict)
    # The part of the inputs that float64 can afford; None: all of it. Its results must be the
    # leading corner of the whole results, where the gradient that comes in is zero outside.
    sample: Callable[[Inputs], Inputs] | None = None
    # Native's calls for an op that native does not have.
    native: Callable[[Any, Inputs], Outputs] | None = None

    # Rounding may flip a ReLU inside the op, and a gradient then jumps: errors are L2 norms instead of
    # maxima.
    kinked: bool = False
    window: tuple[int, int] | None = None  # a convolution's stride and padding
    # torch.backends.cuda.matmul.allow_tf32 while it runs: the name says so.
    tf32: bool = False
    # warpwright.set_float32_matmul_precision("high") while it runs; native stays float32.
    split_tf32: bool = False

    def run(self, functional: Any, inputs: Inputs) -> Outputs:
        """`functional` is warpwright's, or torch's."""
        if self.native is not None and functional is torch.nn.functional:
            return self.native(functional, inputs)
        return self.call(functional, inputs)

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Inside, float32 products may be rounded as the case's name says."""
        previous = get_float32_matmul_precision()
        if self.split_tf32:
            set_float32_matmul_precision("high")
        try:
            with tf32_allowed(self.tf32):
                yield
        finally:
            set_float32_matmul_precision(previous)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def _randn(shape: tuple[int, ...], dtype: torch.dtype, device: str, layout: str = ROWS) -> Tensor:
    x = torch.randn(shape, device=device, dtype=FP32).to(dtype)
    if layout == NHWC:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def _relu(numel: int, dtype: torch.dtype) -> Case:
    e = numel * dtype.itemsize
    return Case(
        "relu",
        f"{numel}",
        dtype,
        ROWS,
        lambda device: {"x": _randn((numel,), dtype, device)},
        lambda F, i: F.relu(i["x"]),
        _work.traffic(e, 2, 3).of("bytes"),
    )


def _batch_norm(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Case:
    e = torch.Size(shape).numel() * dtype.itemsize
    channels = shape[1]

    def make(device: str) -> Inputs:
        return {
            "x": _randn(shape, dtype, device, layout),
            "weight": torch.rand(channels, device=device).requires_grad_(),
            "bias": torch.randn(channels, device=device).requires_grad_(),
        }

    def call(F: Any, i: Inputs) -> Tensor:
        # Without running statistics: they would change under the graph that the backward repeats.
        return F.batch_norm(i["x"], None, None, i["weight"], i["bias"], True)

    return Case(
        "batch_norm",
        "x".join(map(str, shape)),
        dtype,
        layout,
        make,
        call,
        _work.traffic(e, 2, 3).of("bytes"),
    )


def _group_norm(shape: tuple[int, ...], groups: int, dtype: torch.dtype, layout: str) -> Case:
    """Weights in the input's type, as in a model that was cast."""
    e = torch.Size(shape).numel() * dtype.itemsize
    channels = shape[1]

    def make(device: str) -> Inputs:
        vectors = {name: _randn((channels,), dtype, device) for name in ("weight", "bias")}
        return {"x": _randn(shape, dtype, device, layout), **vectors}

    return Case(
        "group_norm",
        "x".join(map(str, shape)) + f", {groups} groups",
        dtype,
        layout,
        make,
        lambda F, i: F.group_norm(i["x"], groups, i["weight"], i["bias"]),
        _work.traffic(e, 2, 3).of("bytes"),
    )


def _instance_norm(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Case:
    e = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "instance_norm",
        "x".join(map(str, shape)),
        dtype,
        layout,
        lambda device: {"x": _randn(shape, dtype, device, layout)},
        lambda F, i: F.instance_norm(i["x"]),
        _work.traffic(e, 2, 3).of("bytes"),
    )


def _batch_norm_activation(
    activation: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> Case:
    """Batch norm and EfficientNet's or MobileNetV3's activation. Native calls one after the other."""
    plain = _batch_norm(shape, dtype, layout)
    name = f"batch_norm_{activation}"
    function = getattr(torch.nn.functional, activation)

    def call(F: Any, i: Inputs) -> Tensor:
        arguments = (None, None, i["weight"], i["bias"], True)
        return getattr(F, name)(i["x"], *arguments)  # type: ignore[no-any-return]

    return replace(plain, op=name, call=call, native=lambda F, i: function(plain.call(F, i)))


def _batch_norm_relu(shape: tuple[int, ...], dtype: torch.dtype, layout: str, add: bool) -> Case:
    """Batch norm, an addition if ``add``, and a relu. Native calls one after the other."""
    plain = _batch_norm(shape, dtype, layout)
    e = torch.Size(shape).numel() * dtype.itemsize

    def make(device: str) -> Inputs:
        residual = {"residual": _randn(shape, dtype, device, layout)} if add else {}
        return {**plain.make(device), **residual}

    def call(F: Any, i: Inputs) -> Tensor:
        arguments = (None, None, i["weight"], i["bias"], True)
        if add:
            return F.batch_norm_add_relu(i["x"], i["residual"], *arguments)
        return F.batch_norm_relu(i["x"], *arguments)

    def native(F: Any, i: Inputs) -> Tensor:
        y = plain.call(F, i)
        return torch.relu(y + i["residual"] if add else y)

    mask = e / 16 if add else 0  # a byte for 16 bytes of x
    return Case(
        "batch_norm_add_relu" if add else "batch_norm_relu",
        plain.case,
        dtype,
        layout,
        make,
        call,
        {"fwd": (3 if add else 2) * e + mask, "bwd": (4 if add else 3) * e + mask},
        native=native,
        kinked=True,
    )


def _max_pool2d(
    shape: tuple[int, ...], k: int, s: int, p: int, dtype: torch.dtype, layout: str
) -> Case:
    n, c, h, w = shape
    outputs = n * c * ((h + 2 * p - k) // s + 1) * ((w + 2 * p - k) // s + 1)
    work = _work.pooling(n * c * h * w, outputs, dtype.itemsize)
    return Case(
        "max_pool2d",
        f"{'x'.join(map(str, shape))} k{k}s{s}",
        dtype,
        layout,
        lambda device: {"x": _randn(shape, dtype, device, layout)},
        lambda F, i: F.max_pool2d(i["x"], k, s, p),
        work.of("bytes"),
    )


def _relu_max_pool2d(
    shape: tuple[int, ...], k: int, s: int, p: int, dtype: torch.dtype, layout: str
) -> Case:
    """Max pooling after a relu, with the same bytes as pooling. Native calls one after the other."""
    plain = _max_pool2d(shape, k, s, p, dtype, layout)
    return replace(
        plain,
        op="relu_max_pool2d",
        call=lambda F, i: F.relu_max_pool2d(i["x"], k, s, p),
        native=lambda F, i: F.max_pool2d(torch.relu(i["x"]), k, s, p),
    )


def _batch_norm_relu_max_pool2d(
    shape: tuple[int, ...], k: int, s: int, p: int, dtype: torch.dtype, layout: str
) -> Case:
    """A stem: batch norm, relu and max pooling. Native calls one after the other."""
    norm, pool = _batch_norm(shape, dtype, layout), _max_pool2d(shape, k, s, p, dtype, layout)
    e = torch.Size(shape).numel() * dtype.itemsize

    def call(F: Any, i: Inputs) -> Tensor:
        arguments = (None, None, i["weight"], i["bias"], True, 0.1, 1e-5)
        return F.batch_norm_relu_max_pool2d(i["x"], *arguments, k, s, p)

    return replace(
        pool,
        op="batch_norm_relu_max_pool2d",
        make=norm.make,
        call=call,
        bytes={"fwd": pool.bytes["fwd"], "bwd": pool.bytes["bwd"] + e},
        native=lambda F, i: F.max_pool2d(torch.relu(norm.call(F, i)), k, s, p),
        kinked=True,
    )


def _cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> Case:
    e = rows * classes * dtype.itemsize

    def make(device: str) -> Inputs:
        return {
            "x": _randn((rows, classes), dtype, device),
            "target": torch.randint(0, classes, (rows,), device=device),
        }

    return Case(
        "cross_entropy",
        f"{rows}x{classes}",
        dtype,
        ROWS,
        make,
        lambda F, i: F.cross_entropy(i["x"], i["target"]),
        {**_work.traffic(e, 1, 2).of("bytes"), "fwd+bwd": 2 * e},
    )


def _linear(m: int, k: int, n: int, dtype: torch.dtype) -> Case:
    work = _work.product(m * k, n * k, m * n, 2.0 * m * n * k, dtype.itemsize)

    def make(device: str) -> Inputs:
        return {
            "x": _randn((m, k), dtype, device),
            "weight": (torch.randn(n, k, device=device) / k**0.5).to(dtype).requires_grad_(),
            "bias": _randn((n,), dtype, device),
        }

    return Case(
        "linear",
        f"{m}x{k}x{n}",
        dtype,
        ROWS,
        make,
        lambda F, i: F.linear(i["x"], i["weight"], i["bias"]),
        work.of("bytes"),
        work.of("flops"),
    )


def _tf32_linear(m: int, k: int, n: int) -> Case:
    plain = _linear(m, k, n, FP32)
    return replace(plain, case=f"{plain.case} tf32", tf32=True)


def _split_tf32_linear(m: int, k: int, n: int) -> Case:
    plain = _linear(m, k, n, FP32)
    return replace(plain, case=f"{plain.case} 3xtf32", split_tf32=True)


def _linear_activation(activation: str, m: int, k: int, n: int, dtype: torch.dtype) -> Case:
    """Linear and an activation. Native calls one after the other."""
    plain = _linear(m, k, n, dtype)
    op = f"linear_{activation}"
    e = m * n * dtype.itemsize  # of gelu and silu the pre-activation is kept, of relu the output
    extra = 0 if activation == "relu" else e
    return replace(
        plain,
        op=op,
        call=lambda F, i: getattr(F, op)(i["x"], i["weight"], i["bias"]),
        bytes={"fwd": plain.bytes["fwd"] + extra, "bwd": plain.bytes["bwd"] + e},
        native=lambda F, i: getattr(F, activation)(plain.call(F, i)),
        kinked=activation == "relu",
    )


def _linear_cross_entropy(rows: int, features: int, classes: int, dtype: torch.dtype) -> Case:
    """A training step's share: the forward alone leaves the gradients out, or computes them all."""
    size = dtype.itemsize

    def make(device: str) -> Inputs:
        weight = (torch.randn(classes, features, device=device) / features**0.5).to(dtype)
        return {
            "x": _randn((rows, features), dtype, device),
            "weight": weight.requires_grad_(),
            "target": torch.randint(0, classes, (rows,), device=device),
        }

    def native(F: Any, i: Inputs) -> Tensor:
        return F.cross_entropy(F.linear(i["x"], i["weight"]), i["target"])

    return Case(
        "linear_cross_entropy",
        f"{rows}x{features}x{classes}",
        dtype,
        ROWS,
        make,
        lambda F, i: F.linear_cross_entropy(i["x"], i["weight"], i["target"]),
        {"fwd+bwd": 2 * size * features * (rows + classes)},
        {"fwd+bwd": 6.0 * rows * features * classes},
        native=native,
    )


def _conv2d(
    shape: tuple[int, ...],
    out: int,
    k: int,
    s: int,
    p: int,
    dtype: torch.dtype,
    layout: str,
    bias: bool = True,
    groups: int = 1,
) -> Case:
    """Without a bias each gradient is a pass of its own."""
    n, c, h, w = shape
    q = ((h + 2 * p - k) // s + 1) * ((w + 2 * p - k) // s + 1)
    group_c = c // groups
    flops = 2.0 * n * q * out * group_c * k * k
    # A stride beyond the window steps over pixels. The gradient is written for all of them.
    read = n * c * min(h * w, q * k * k)
    weights = out * group_c * k * k

    def work(input_grad: bool = True, weight_grad: bool = True) -> _work.Work:
        elements = n * c * h * w, weights, n * out * q
        wanted = input_grad, weight_grad
        return _work.product(*elements, flops, dtype.itemsize, read=read, wanted=wanted)

    def of_passes(what: str) -> dict[str, float]:
        if bias:
            return work().of(what)
        return {
            "fwd": work().of(what)["fwd"],
            "dgrad": work(weight_grad=False).of(what)["bwd"],
            "wgrad": work(input_grad=False).of(what)["bwd"],
        }

    def make(device: str) -> Inputs:
        weight = torch.randn(out, group_c, k, k, device=device) / (group_c * k * k) ** 0.5
        weight = weight.to(dtype)
        if layout == NHWC:
            weight = weight.contiguous(memory_format=torch.channels_last)
        return {
            "x": _randn(shape, dtype, device, layout),
            "weight": weight.requires_grad_(),
            "bias": _randn((out,), dtype, device) if bias else None,
        }

    return Case(
        "conv2d",
        f"{'x'.join(map(str, shape))}->{out} k{k}s{s}"
        f"{'' if groups == 1 else f' g{groups}'}{'' if bias else ' no bias'}",
        dtype,
        layout,
        make,
        lambda F, i: F.conv2d(i["x"], i["weight"], i["bias"], s, p, 1, groups),
        of_passes("bytes"),
        of_passes("flops"),
        lambda i: {**i, "x": i["x"].detach()[:4].requires_grad_()},
        window=(s, p),
    )


def _conv2d_batch_norm(
    shape: tuple[int, ...], out: int, k: int, s: int, form: str, dtype: torch.dtype, layout: str
) -> Case:
    """A convolution and the batch norm after it; native calls one after the other."""
    plain = _conv2d(shape, out, k, s, k // 2, dtype, layout)
    n, _, h, w = shape
    e = n * out * ((h - 1) // s + 1) * ((w - 1) // s + 1) * dtype.itemsize

    def make(device: str) -> Inputs:
        norm = {name: _randn((out,), torch.float32, device) for name in ("gamma", "beta")}
        return {**plain.make(device), "bias": None, **norm}

    def call(F: Any, i: Inputs) -> Tensor:
        norm = {"norm_weight": i["gamma"], "norm_bias": i["beta"], "training": True}
        function = getattr(F, f"conv2d_batch_norm{form}")
        added = (i["x"],) if "add" in form else ()
        return function(i["x"], *added, i["weight"], None, s, k // 2, **norm)  # type: ignore[no-any-return]

    def native(F: Any, i: Inputs) -> Tensor:
        y = F.batch_norm(plain.call(F, i), None, None, i["gamma"], i["beta"], True)
        y = y + i["x"] if "add" in form else y
        return getattr(torch.nn.functional, form.rpartition("_")[2])(y) if form else y

    reads = 2 if "add" in form else 1
    return Case(
        f"conv2d_batch_norm{form}",
        f"{'x'.join(map(str, shape))}->{out} k{k}s{s}",
        dtype,
        layout,
        make,
        call,
        {"fwd": plain.bytes["fwd"] + (reads + 1) * e, "bwd": plain.bytes["bwd"] + (reads + 2) * e},
        plain.flops,
        native=native,
        kinked="relu" in form,
    )


def _attention(b: int, h: int, s: int, d: int, causal: bool, dtype: torch.dtype = BF16) -> Case:
    flops = 4.0 * b * h * s * s * d * (0.5 if causal else 1.0)
    n = b * h * s * d
    work = _work.attention(n, n, n, flops, dtype.itemsize)

    def make(device: str) -> Inputs:
        return {name: _randn((b, h, s, d), dtype, device) for name in ("q", "k", "v")}

    def first_head(i: Inputs) -> Inputs:
        return {name: x.detach()[:1, :1].requires_grad_() for name, x in i.items()}

    return Case(
        "scaled_dot_product_attention",
        f"b{b} h{h} s{s} d{d} {'causal' if causal else 'full'}",
        dtype,
        ROWS,
        make,
        lambda F, i: F.scaled_dot_product_attention(i["q"], i["k"], i["v"], is_causal=causal),
        work.of("bytes"),
        work.of("flops"),
        first_head,
    )
