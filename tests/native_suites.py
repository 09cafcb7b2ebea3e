"""PyTorch's own op_db with our functions put in, and how one sample of it is judged.

The databases ship inside the torch wheel. An entry is copied and its `op` replaced; its sample,
reference and error inputs, dtypes and flags stay. The original entry is the oracle.
"""

import copy
import functools
import math

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core as opinfo
from torch.testing._utils import wrapper_set_seed
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import warpwright.functional as F
from warpwright.testing import (
    ERROR_FACTOR,
    assert_same,
    max_error,
    small_on_cpu,
    strides_are_defined,
    to_double,
)

# Importing the databases forbids setting backend flags (conftest.py does); allow it again.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

# Each iterator over samples looks through the whole stack for a unittest method, for 0.3 s under
# pytest. Ours are functions: there is none to find.
common_utils.extract_test_fn = opinfo.extract_test_fn = lambda: None

LOW_PRECISION = (torch.bfloat16, torch.float16)


def max_pool2d_backward(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, **_
):
    """op_db's function of this name: pool, then the gradient of the sum of the output.

    Native's op also takes `input`, with a zero derivative; the zero term stands for that.
    """
    leaf = input.detach().requires_grad_()
    with torch.enable_grad():
        output = F.max_pool2d(leaf, kernel_size, stride, padding, dilation, ceil_mode)
    (gradient,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    return gradient.add(input, alpha=0) if input.requires_grad else gradient


def embedding(weight, indices, **kwargs):
    """op_db's order of the arguments."""
    return F.embedding(indices, weight, **kwargs)


# (name, variant) in op_db -> ours.
OURS = {
    ("nn.functional.relu", ""): F.relu,
    ("nn.functional.gelu", ""): F.gelu,
    ("nn.functional.silu", ""): F.silu,
    ("sigmoid", ""): F.sigmoid,
    ("tanh", ""): F.tanh,
    ("cumsum", ""): F.cumsum,
    ("nn.functional.group_norm", ""): F.group_norm,
    ("nn.functional.instance_norm", ""): F.instance_norm,
    ("nn.functional.embedding", ""): embedding,
    ("softmax", ""): F.softmax,
    ("softmax", "with_dtype"): F.softmax,
    ("log_softmax", ""): F.log_softmax,
    ("log_softmax", "with_dtype"): F.log_softmax,
    ("cumprod", ""): F.cumprod,
    ("logcumsumexp", ""): F.logcumsumexp,
    ("sum", ""): F.sum,
    ("mean", ""): F.mean,
    ("amax", ""): F.amax,
    ("logsumexp", ""): F.logsumexp,
    ("var", ""): F.var,
    ("var", "unbiased"): F.var,
    ("std", ""): F.std,
    ("std", "unbiased"): F.std,
    ("nn.functional.adaptive_avg_pool2d", ""): F.adaptive_avg_pool2d,
    ("nn.functional.max_pool2d", ""): F.max_pool2d,
    ("max_pool2d_with_indices_backward", ""): max_pool2d_backward,
    ("nn.functional.batch_norm", ""): F.batch_norm,
    ("nn.functional.batch_norm", "without_cudnn"): F.batch_norm,
    ("nn.functional.layer_norm", ""): F.layer_norm,
    ("nn.functional.rms_norm", ""): F.rms_norm,
    ("nn.functional.cross_entropy", ""): F.cross_entropy,
    ("nn.functional.linear", ""): F.linear,
    ("nn.functional.conv2d", ""): F.conv2d,
    ("nn.functional.conv_transpose2d", ""): F.conv_transpose2d,
    ("nn.functional.scaled_dot_product_attention", ""): functools.partial(
        wrapper_set_seed, F.scaled_dot_product_attention
    ),
}


# Their functions call native's for complex numbers, which test_activation.py checks.
COMPLEX_IS_NATIVE = ("sigmoid", "tanh")


def fused_attention(native):
    """Native attention on the one form of inputs that its fused CUDA kernels take: 4-D, not broadcast.

    By its formula it computes 16-bit inputs in float32, with an error that no flash kernel has.
    """

    def function(query, key, value, *args, **kwargs):
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)))
        missing = max(0, 2 - len(batch))
        expanded = [
            t.expand(*batch, *t.shape[-2:]).contiguous()[(None,) * missing]
            for t in (query, key, value)
        ]
        output = native(*expanded, *args, **kwargs)
        return output[(0,) * missing]

    return function


class Entry:
    """One entry of op_db: `native` as it stands, `ours` a copy of it with our function."""

    def __init__(self, native):
        self.native = native
        self.ours = copy.copy(native)
        self.ours.op = OURS[native.name, native.variant_test_name]
        self.id = native.full_name.removeprefix("nn.functional.")
        # A rounded input may become any error (see compare); a comparison has none.
        self.amplifies = not self.id.startswith(("relu", "max_pool2d"))

    def has_strides(self, device):
        """Which attention kernel of native's runs on a GPU, and so its layout, depends on the case."""
        return device == "cpu" or not self.id.startswith("scaled_dot_product_attention")

    def peer(self, device, dtype):
        """The native function whose error is the measure of ours."""
        attention = self.id.startswith("scaled_dot_product_attention")
        if attention and device == "cuda" and dtype in LOW_PRECISION:
            return fused_attention(self.native.op)
        return self.native.op

    def dtypes(self, device):
        found = sorted(self.native.supported_dtypes(device), key=str)
        return [d for d in found if not (d.is_complex and self.id in COMPLEX_IS_NATIVE)]

    def samples(self, device, dtype, *, reference=True, requires_grad=None, set_seed=True):
        """Every sample (and reference) input of the entry; without a seed set, with new values."""
        if requires_grad is None:
            requires_grad = dtype in self.native.supported_backward_dtypes(device)
        makers = [self.native.sample_inputs]
        if reference and self.native.reference_inputs_func is not None:
            makers.append(self.native.reference_inputs)
        count = 0
        for make in makers:
            for sample in make(device, dtype, requires_grad=requires_grad, set_seed=set_seed):
                count += 1
                yield sample
        assert count, f"{self.id} has no samples for {dtype} on {device}"


ENTRIES = [Entry(info) for info in op_db if (info.name, info.variant_test_name) in OURS]
assert len(ENTRIES) == len(OURS), "op_db lacks an entry of ours"


def arguments(sample):
    return (sample.input, *sample.args), dict(sample.kwargs)


def is_random(sample):
    return sample.kwargs.get("dropout_p", 0.0) > 0.0


def inexact(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def private(leaf):
    """A copy in storage of its own, same strides and offset, of a tensor that needs no gradient."""
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or leaf.is_meta:
        return leaf
    storage = leaf.untyped_storage().clone()
    return leaf.new_empty(0).set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())


class Run:
    """One call: outputs, gradients, and what the op did to its other arguments."""

    def __init__(self, function, args, kwargs, cotangents=None, draw=torch.randn_like):
        # An op may update an argument (running statistics): each run gets its own.
        args, kwargs = tree_map(private, (args, kwargs))
        self.outputs = list(tree_leaves(function(*args, **kwargs)))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.arguments = [t.detach() for t in tensors]
        self.leaves = [t for t in tensors if t.requires_grad]
        roots = [t for t in self.outputs if t.requires_grad]
        self.cotangents = cotangents
        self.gradients = [None] * len(self.leaves)
        if self.leaves and roots:
            if cotangents is None:
                self.cotangents = [draw(t) for t in roots]
            self.gradients = torch.autograd.grad(
                roots,
                self.leaves,
                [c.to(t.dtype) for c, t in zip(self.cotangents, roots, strict=True)],
                allow_unused=True,
            )


def is_missing(ours, native, what):
    """Whether native gives no such gradient. Ours may be zero there.

    Newer releases leave the mask out of the graph of attention over nothing.
    """
    if native is None:
        assert ours is None or not ours.any(), f"{what}: not zero, but native has none"
    else:
        assert ours is not None, f"{what}: native has it"
    return native is None


class Errors:
    """The error rule over many small cases: typically no more than 1.5 x native's error.

    On few elements the error of either side is luck. One case alone is therefore held to 16 x, and
    all together to 1.5 x: in the geometric mean of the ratios, and in the 95th
    percentile where there are enough cases to have one. In float64 there is no finer oracle:
    native's float32 error on the same input, scaled by the ratio of the roundings, says how much
    the case amplifies; the oracle's own error of that size is allowed too.
    """

    SINGLE_CASE = 16.0
    DRAWS = 8
    ENOUGH = 300
    FEW, ROUNDS = 40, 8

    def __init__(self):
        self.seen = {}  # (kind, dtype) -> [(ours, native)], in allowed ulps of each maximum
        self.only_mean = False  # new values of a case that was judged alone: they count in the mean

    def judge(self, ours, native, exact, coarse, what, kind, yardstick=0.0, nudged=None):
        """`yardstick`: the size of what cancels where the result is zero or nearly so.

        `nudged(draw)`: the exact result of inputs that are off by their rounding, another each draw.
        """
        ours, native, exact = small_on_cpu(ours, native, exact)
        coarse = coarse if coarse is None else small_on_cpu(coarse)[0].to(exact.device)
        if native.is_complex():
            assert ours.dtype == native.dtype
            parts = lambda t: torch.view_as_real(t.resolve_conj())  # noqa: E731
            ours, native, exact = parts(ours), parts(native), parts(exact)
            coarse = None if coarse is None else parts(coarse)
            nudged = nudged and (lambda draw, complex_result=nudged: parts(complex_result(draw)))
        if not native.is_floating_point():
            assert_same(ours, native, what)
            return
        assert ours.shape == native.shape, f"{what}: shape {ours.shape}, native {native.shape}"
        assert ours.dtype == native.dtype, f"{what}: dtype {ours.dtype}, native {native.dtype}"
        for name in ("isnan", "isposinf", "isneginf"):
            same = torch.equal(getattr(ours, name)(), getattr(native, name)())
            assert same, f"{what}: {name} at other places than native's"
        finite = exact[torch.isfinite(exact)]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        eps = torch.finfo(ours.dtype).eps
        # A zero of ours where the oracle has only its own rounding, as native's gradients of a row of one
        # element have, enlarged by 1 / sqrt(eps).
        if ours.dtype == torch.float64 and not ours.any() and scale <= 2**16 * eps * yardstick:
            return
        error, native_error = max_error(ours, exact), max_error(native, exact)
        ulps = 16 * eps * yardstick if scale == 0.0 else eps * scale
        if ours.dtype == torch.float64:
            ulps *= 16
            if coarse is not None:
                fine = eps / torch.finfo(torch.float32).eps
                native_error = (1 + 1 / ERROR_FACTOR) * max_error(coarse, exact) * fine
        allowed = self.SINGLE_CASE * native_error + ulps
        if native.dtype in LOW_PRECISION:  # their sums are float32, and so is what cancels in them
            allowed += 4 * torch.finfo(torch.float32).eps * yardstick
        fixed = allowed
        for draw in range(self.DRAWS if nudged and not self.only_mean else 0):
            if error <= allowed:
                break
            # Two values that swap places (a maximum's) do so in some draws only.
            moved = self.SINGLE_CASE * max_error(nudged(draw).to(exact.device), exact)
            allowed = max(allowed, fixed + moved)
        assert error <= allowed or self.only_mean, (
            f"{what}: max error {error:.3e} against float64, allowed {allowed:.3e} "
            f"(native: {native_error:.3e})"
        )
        # Ulps of a result that is only the oracle's rounding, around a zero, say nothing.
        noise = 16 * torch.finfo(torch.float64).eps * yardstick
        if scale > noise and math.isfinite(native_error / ulps):
            self.seen.setdefault((kind, ours.dtype), []).append((error / ulps, native_error / ulps))

    def rounds(self):
        """Yields 0, 1, ... until there are enough cases for a mean: one that nearly cancels has any error."""
        for i in range(self.ROUNDS):
            self.only_mean = i > 0
            yield i
            if all(len(pairs) >= self.FEW for pairs in self.seen.values()):
                return

    def check(self):
        """To be called after the last case."""
        for (kind, dtype), pairs in self.seen.items():
            ours, native = torch.tensor(pairs, dtype=torch.float64).unbind(1)
            ratio = ((ours + 1) / (native + 1)).log().mean().exp().item()
            assert ratio <= ERROR_FACTOR, f"{kind}, {dtype}: typically {ratio:.2f} x native's error"
            if len(pairs) >= self.ENOUGH:
                a, b = ours.quantile(0.95).item(), native.quantile(0.95).item()
                assert a <= ERROR_FACTOR * b + 1, (
                    f"{kind}, {dtype}: 95 % of the errors up to {a:.2f} ulp, native's {b:.2f} ulp"
                )


def to_single(value):
    """Floating float64 leaves, and a dtype= of float64, as float32; None if `value` has no float64."""
    if not any(
        isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(value)
    ):
        return None

    def convert(leaf):
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
            return leaf.detach().float().requires_grad_(leaf.requires_grad)
        # Native's backward of cumprod raises where dtype= is wider than the input.
        return torch.float32 if leaf is torch.float64 else leaf

    return tree_map(convert, value)


def gelu_of_infinity(x, **options):
    """Native's gelu; in float64 where it makes NaN of infinity, as oneDNN 3.10's on AVX-512 does."""
    y = torch.nn.functional.gelu(x, **options)
    if x.is_cuda or not (y.isnan() & x.isposinf()).any():
        return y
    return torch.nn.functional.gelu(x.double(), **options).to(x.dtype)


def off_by_rounding(value):
    """Inexact leaves in 64 bits, each element one unit of rounding larger or smaller."""

    def nudge(leaf):
        if not isinstance(leaf, torch.Tensor) or not inexact(leaf):
            return leaf
        sign = torch.randint(2, leaf.shape, dtype=torch.float64, device=leaf.device) * 2 - 1
        nudged = to_double(leaf.detach()) * (1 + torch.finfo(leaf.dtype).eps * sign)
        return nudged.requires_grad_(leaf.requires_grad)

    return tree_map(nudge, value)


def strides_of(tensor):
    """The strides that address anything: those of dimensions longer than 1."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def compare(
    our_function,
    native_function,
    args,
    kwargs,
    what,
    errors=None,
    *,
    amplifies=False,
    strides=True,
    cancels=1.0,
):
    """Values, strides, gradients and updated arguments of ours against native and float64.

    `errors` collects over many cases; without it the full rule is applied to this one.
    `amplifies`: the op can turn the rounding of its inputs into any error (a variance of two close
    values). A case does not count if rounding the inputs moves the exact result as much.
    `cancels`: the size of the terms that cancel in a gradient, in cotangents.
    """
    strides = strides and strides_are_defined((args, kwargs))
    book = errors or Errors()
    native = Run(native_function, args, kwargs)
    ours = Run(our_function, args, kwargs, native.cotangents)
    exact = Run(native_function, *to_double((args, kwargs)), native.cotangents)
    single = to_single((args, kwargs))
    coarse = None if single is None else Run(native_function, *single, native.cotangents)
    sizes = [t.abs().max().item() for t in exact.cotangents or () if t.numel()]
    yardstick = cancels * max(sizes, default=0.0)

    @functools.cache
    def nudged(draw):
        cotangents = native.cotangents and off_by_rounding(native.cotangents)
        return Run(native_function, *off_by_rounding((args, kwargs)), cotangents)

    for kind in ("outputs", "arguments", "gradients"):
        lists = [getattr(run, kind) for run in (ours, native, exact, coarse or native)]
        for i, (a, b, e, c) in enumerate(zip(*lists, strict=True)):
            where = f"{what}: {kind}[{i}]"
            if is_missing(a, b, where):
                continue
            values = [t.detach() for t in (a, b, e)]
            other = (
                (lambda n, k=kind, i=i: getattr(nudged(n), k)[i].detach()) if amplifies else None
            )
            book.judge(*values, c.detach() if coarse else None, where, kind, yardstick, other)
            if kind == "outputs":
                assert not (strides and a.numel()) or strides_of(a) == strides_of(b), (
                    f"{where}: strides {a.stride()}, native {b.stride()}"
                )
                # Ours may be in a graph where native's is not: see is_missing.
                allowed = b.requires_grad or bool(ours.leaves)
                assert b.requires_grad <= a.requires_grad <= allowed, f"{where}: requires_grad"
    if errors is None:
        book.check()


def check_dropout(entry, sample, what):
    """Dropout draws other numbers than native: the mean over many draws must be the result without.

    With v = 1 and no mask each output is (kept weights) / (1 - p), whose mean is 1.
    """
    args, kwargs = arguments(sample)
    native = entry.native.op(*args, **kwargs)
    ours = entry.ours.op(*args, **kwargs)
    assert (ours.shape, ours.dtype) == (native.shape, native.dtype)
    assert not entry.has_strides(ours.device.type) or ours.stride() == native.stride()
    assert torch.isfinite(ours).all(), what
    again = entry.ours.op(*args, **kwargs)
    assert_same(ours.detach(), again.detach(), f"{what}: same seed")
    query, key, value = (t.detach().double() for t in args[:3])
    draws = 400
    shape = (draws, *torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))
    expand = lambda t: t.expand(*shape, *t.shape[-2:])  # noqa: E731
    output = F.scaled_dot_product_attention(
        expand(query), expand(key), torch.ones_like(expand(value)), **kwargs
    )
    p = kwargs["dropout_p"]
    # Each draw's variance is p / (1 - p) * sum of squared weights <= p / (1 - p).
    deviation = math.sqrt(p / (1 - p) / (output.numel() // output.shape[-1]))
    mean = output[..., 0].mean().item()
    assert abs(mean - 1) < 6 * deviation, f"{what}: mean {mean}"
    assert len(output[..., 0].unique()) > 2, f"{what}: nothing was dropped"


def flatten_differentiable(function, sample, first_output_only=False):
    """(function of the differentiable inputs only, those inputs)."""
    flat, spec = tree_flatten(arguments(sample))
    where = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.requires_grad]

    def call(*inputs):
        values = list(flat)
        for i, value in zip(where, inputs, strict=True):
            values[i] = value
        # Running statistics must be the same for each of gradcheck's calls.
        values = [
            v.clone() if isinstance(v, torch.Tensor) and i not in where and inexact(v) else v
            for i, v in enumerate(values)
        ]
        args, kwargs = torch.utils._pytree.tree_unflatten(values, spec)
        outputs = [t for t in tree_leaves(function(*args, **kwargs)) if inexact(t)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call, tuple(flat[i] for i in where)
