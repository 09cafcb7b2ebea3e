"""Random cases for each op: shapes at the edges of tiles and vectors, layouts, dtypes, masks, values.

hypothesis draws the case and shrinks a failing one. Oracles: native, and native in float64.
`WARPWRIGHT_FUZZ_CASES` cases an op (spread over the dtypes); the same ones in each run, unless
`WARPWRIGHT_FUZZ_RANDOM=1` asks for others.
"""

import os
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_suites import Errors, Run, compare, is_missing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import warpwright.functional as F
from warpwright.testing import assert_same, to_double

CASES = int(os.environ.get("WARPWRIGHT_FUZZ_CASES", "2000"))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NATIVE = torch.nn.functional

SMALL = st.sampled_from([0, 1, 1, 2, 3, 5, 7])
# Around vector widths and tile edges, and primes.
SIZE = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65])
SIDE = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17])
FEATURES = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 33, 63, 64, 65, 127, 128, 129, 131])
LAYOUTS = ("contiguous", "offset", "channels_last", "transposed", "strided", "expanded")
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40)

fuzz = settings(
    max_examples=max(1, CASES // len(DTYPES)),
    deadline=None,
    database=None,
    derandomize=os.environ.get("WARPWRIGHT_FUZZ_RANDOM", "0") != "1",
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
pytestmark = pytest.mark.timeout(3600)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


class Maker:
    """Draws tensors: values of a kind, in a layout, that need a gradient or don't."""

    def __init__(
        self,
        draw,
        device,
        dtype,
        kinds=("normal", "normal", "integer", "special"),
        specials=SPECIAL,
    ):
        self.draw, self.device, self.dtype = draw, device, dtype
        self.specials = list(pairwise(specials))
        self.kind = draw(st.sampled_from(kinds), label="values")
        torch.manual_seed(draw(st.integers(0, 2**31 - 1), label="seed"))

    @property
    def exact(self):
        return self.kind == "integer"

    def values(self, shape, dtype, special):
        if self.exact:
            return torch.randint(-3, 4, shape).to(dtype)
        x = torch.randn(shape)
        if special and self.kind == "special" and x.numel():
            where = torch.randint(x.numel(), (2,))
            x.view(-1)[where] = torch.tensor(self.draw(st.sampled_from(self.specials)))
        return x.to(dtype)

    def arrange(self, x):
        layout = self.draw(st.sampled_from(LAYOUTS), label="layout")
        if layout == "offset":
            offset = self.draw(st.integers(1, 7), label="offset")
            base = x.new_empty(x.numel() + offset)
            x = base[offset:].view(x.shape).copy_(x)
        elif layout == "channels_last" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        elif layout == "transposed" and x.dim() >= 2:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif layout == "strided" and x.dim() >= 1:
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 77)
            wide[..., ::2] = x
            x = wide[..., ::2]
        elif layout == "expanded" and x.dim() >= 1 and x.shape[0] > 1:
            x = x[:1].expand_as(x)
        return x

    def __call__(self, *shape, dtype=None, grad=True, arrange=True, special=True):
        dtype = dtype or self.dtype
        x = self.values(shape, dtype, special).to(self.device)
        if arrange:
            x = self.arrange(x)
        if grad and dtype.is_floating_point:
            x = x.detach().requires_grad_(self.draw(st.booleans(), label="requires_grad"))
        return x

    def maybe(self, *shape, **options):
        return self(*shape, **options) if self.draw(st.booleans(), label="given") else None


def integers_like(tensor):
    return torch.randint_like(tensor, -3, 4)


def check_exact(ours, native, args, kwargs):
    """Integer values: each of our results is the exact one rounded once, or native's bit for bit."""
    b = Run(native, args, kwargs, draw=integers_like)
    a = Run(ours, args, kwargs, b.cotangents)
    e = Run(native, *to_double((args, kwargs)), b.cotangents)
    for kind in ("outputs", "gradients"):
        for x, y, z in zip(getattr(a, kind), getattr(b, kind), getattr(e, kind), strict=True):
            if is_missing(x, y, kind):
                continue
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            right = (x == z.to(x.dtype)) | (x == y)
            assert right.all(), (
                f"{kind}: {x[~right][:4]} for {z[~right][:4]}, native {y[~right][:4]}"
            )


def check(maker, errors, ours, native, args, kwargs=None, *, sums_only=True, **options):
    """Ours against native; where native raises, ours raises the same type."""
    kwargs = kwargs or {}
    try:
        private = tree_map(lambda t: t.detach().clone() if torch.is_tensor(t) else t, args)
        native(*private, **kwargs)
    except torch.AcceleratorError:
        raise  # nothing runs in this process's context any more
    except Exception as error:
        with pytest.raises(type(error)):
            ours(*args, **kwargs)
        return
    if maker.exact and sums_only:
        check_exact(ours, native, args, kwargs)
    else:
        compare(ours, native, args, kwargs, "case", errors, **options)


def run(test):
    """Runs `test(draw, errors)` on drawn cases, then the error rule over all of them."""
    errors = Errors()

    @fuzz
    @given(st.data())
    def body(data):
        test(data.draw, errors)

    body()
    errors.check()


@pytest.mark.parametrize("dtype", DTYPES + INTEGERS, ids=lambda d: str(d).removeprefix("torch."))
def test_relu(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        x = make(*draw(st.lists(SIZE, max_size=3)))
        check(make, errors, F.relu, NATIVE.relu, (x,), sums_only=False)
        assert_same(F.relu(x.detach()), NATIVE.relu(x.detach()))
        ours, native = x.detach().clone(), x.detach().clone()
        assert_same(F.relu_(ours), NATIVE.relu_(native))

    run(test)


@each_dtype
def test_max_pool2d(device, dtype):
    window = st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 5), st.integers(1, 5)))
    step = st.one_of(st.none(), st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3)))
    margin = st.one_of(
        st.just(0), st.integers(0, 2), st.tuples(st.integers(0, 2), st.integers(0, 2))
    )

    def test(draw, errors):
        make = Maker(draw, device, dtype)
        shape = (draw(SMALL), draw(SIZE), draw(SIDE), draw(SIDE))[draw(st.integers(0, 1)) :]
        # Dilation with padding or ceil_mode can make a window without a tap inside: native's backward
        # then writes outside its gradient. test_max_pool2d.py has that case for ours alone.
        dilation = draw(st.integers(1, 2))
        padding = draw(margin) if dilation == 1 else 0
        ceil_mode = dilation == 1 and draw(st.booleans())
        args = (make(*shape), draw(window), draw(step), padding, dilation)
        kwargs = {"ceil_mode": ceil_mode, "return_indices": draw(st.booleans())}
        check(make, errors, F.max_pool2d, NATIVE.max_pool2d, args, kwargs)

    run(test)


@each_dtype
def test_linear(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        batch = draw(st.lists(SMALL, max_size=2)) + draw(st.lists(SIZE, max_size=1))
        k, n = draw(FEATURES), draw(FEATURES)
        args = (make(*batch, k), make(n, k), make.maybe(n))
        check(make, errors, F.linear, NATIVE.linear, args)

    run(test)


@each_dtype
def test_conv2d(device, dtype):
    pair = lambda low, high: st.one_of(  # noqa: E731
        st.integers(low, high), st.tuples(st.integers(low, high), st.integers(low, high))
    )
    channels = st.sampled_from([1, 2, 3, 4, 5, 8, 9])
    # Native's 16-bit CPU convolution spreads a NaN to outputs that don't see it.
    exactly = ("normal", "normal", "integer") + (("special",) if dtype.itemsize > 2 else ())

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=exactly)
        groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
        c_in, c_out = draw(channels), draw(channels)
        shape = (draw(st.sampled_from([0, 1, 2, 3])), groups * c_in, draw(SIDE), draw(SIDE))
        weight = (groups * c_out, c_in, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        padding = draw(st.one_of(pair(0, 3), st.sampled_from(["same", "valid"])))
        stride = 1 if padding == "same" else draw(pair(1, 3))
        args = (
            make(*shape[draw(st.integers(0, 1)) :]),
            # Not here: native multiplies the padding's zeros by an infinite weight, or leaves them out.
            make(*weight, special=False),
            make.maybe(groups * c_out, special=False),
            stride,
            padding,
            draw(pair(1, 2)),
            groups,
        )
        check(make, errors, F.conv2d, NATIVE.conv2d, args)

    run(test)


@each_dtype
def test_batch_norm(device, dtype):
    def test(draw, errors):
        statistics = draw(st.booleans())
        training = True if not statistics else draw(st.booleans())
        # An infinity makes native's running mean on a GPU infinite or NaN, by its place.
        specials = (SPECIAL[0], *SPECIAL[3:]) if device == "cuda" and training else SPECIAL
        make = Maker(draw, device, dtype, ("normal", "normal", "special"), specials)
        c = draw(st.sampled_from([1, 2, 3, 5, 7, 8, 16, 17, 33]))
        shape = (draw(SMALL), c, *draw(st.lists(SIDE, max_size=3)))
        # Half inputs may come with float32 parameters, as under autocast.
        side = draw(st.sampled_from([dtype, torch.float32])) if dtype.itemsize == 2 else dtype
        mean = make(c, dtype=side, grad=False, arrange=False, special=False) if statistics else None
        var = torch.rand(c).to(device, side) + 0.25 if statistics else None
        # No special values: native folds them into one scale and shift, where inf - inf is NaN.
        weight, bias = (make.maybe(c, dtype=side, special=False) for _ in range(2))
        if device == "cuda" and weight is None:
            bias = None  # native's gradient is zero there, or an internal error
        args = (make(*shape), mean, var, weight, bias)
        options = (
            training,
            draw(st.sampled_from([0.0, 0.1, 1.0])),
            draw(st.sampled_from([1e-5, 0.1])),
        )
        check(make, errors, F.batch_norm, NATIVE.batch_norm, (*args, *options), amplifies=True)

    run(test)


@each_dtype
def test_cross_entropy(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal", "normal", "special"))
        c = draw(st.sampled_from([1, 2, 3, 5, 10, 17, 33, 64, 129]))
        rows = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 9]), min_size=0, max_size=3))
        shape = (rows[0], c, *rows[1:]) if rows else (c,)
        ignore = draw(st.sampled_from([-100, 0, 1]))
        if draw(st.booleans(), label="soft"):
            target = torch.rand(shape).softmax(dim=1 if rows else 0).to(device, dtype)
            target.requires_grad_(draw(st.booleans()))
        else:
            target = torch.randint(0, c, rows, device=device)
            target[torch.rand(rows, device=device) < 0.2] = ignore
        weight = None
        if draw(st.booleans(), label="weighted"):
            weight = torch.rand(c).to(device, dtype) + 0.1
        kwargs = {
            "weight": weight,
            "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
            "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        }
        if not target.is_floating_point():
            kwargs["ignore_index"] = ignore
        args = (make(*shape), target)
        check(make, errors, F.cross_entropy, NATIVE.cross_entropy, args, kwargs, amplifies=True)

    run(test)


def is_misaligned(x):
    return torch.is_tensor(x) and x.is_cuda and x.data_ptr() % 16 != 0


def native_attention(*args, **kwargs):
    """Native; by its formula if its CUDA kernels (torch 2.11.0) do not take the call.

    They raise for some strides, and end the process's context for operands off 16 bytes (which get
    copies) and for a mask that alone needs a gradient: the forward saves no log-sum-exp then, the
    backward reads one (pytorch/pytorch#148476).
    """
    args, kwargs = tree_map(lambda t: t.clone() if is_misaligned(t) else t, (args, kwargs))
    mask = kwargs.get("attn_mask")
    only_mask = mask is not None and mask.requires_grad and not any(t.requires_grad for t in args)
    if not (only_mask and mask.is_cuda):
        with suppress(RuntimeError):
            return NATIVE.scaled_dot_product_attention(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return NATIVE.scaled_dot_product_attention(*args, **kwargs)


@each_dtype
def test_scaled_dot_product_attention(device, dtype):
    length = st.sampled_from([1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65])

    def test(draw, errors):
        # No NaN: a row of NaN scores is NaN here, native's CPU kernel makes it zero. Only in q and
        # without gradients: ours leaves masked keys out, and native may have 0 * inf for them.
        kinds = ("normal", "normal", "normal", "special")
        make = Maker(draw, device, dtype, kinds, specials=SPECIAL[1:])
        finite = {"special": False, "grad": make.kind != "special"}
        s_q, s_k = draw(length), draw(length)
        d = draw(st.sampled_from([1, 2, 3, 4, 8, 9, 16, 17, 32, 40]))
        d_v = draw(st.sampled_from([d, d, d, 1, 5, 16]))
        batch = draw(st.sampled_from([0, 1, 2, 3]))
        heads, shared = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 3)]))
        if draw(st.booleans(), label="enable_gqa"):
            kwargs = {"enable_gqa": True}
        else:
            kwargs, shared = {}, heads
        kwargs["scale"] = draw(st.sampled_from([None, 0.5, 1.0]))
        mask = draw(st.sampled_from(["none", "causal", "bool", "float"]))
        if mask == "causal":
            kwargs["is_causal"] = True
        elif mask != "none":
            lead = draw(st.sampled_from([(), (heads,), (1, heads), (batch, 1), (batch, heads)]))
            if mask == "bool":
                kwargs["attn_mask"] = torch.rand(*lead, s_q, s_k, device=device) < 0.7
            else:
                kwargs["attn_mask"] = make(*lead, s_q, s_k, **finite)
        args = (
            make(batch, heads, s_q, d, grad=make.kind != "special"),
            make(batch, shared, s_k, d, **finite),
            make(batch, shared, s_k, d_v, **finite),
        )
        if draw(st.booleans(), label="3-D") and batch and "enable_gqa" not in kwargs:
            if "attn_mask" in kwargs and kwargs["attn_mask"].dim() == 4:
                kwargs["attn_mask"] = kwargs["attn_mask"].detach()[0]
            args = tuple(t.detach()[0].requires_grad_(t.requires_grad) for t in args)
        # Which of native's kernels runs on a GPU, and so its layout, depends on the case.
        options = {"amplifies": True, "strides": device == "cpu"}
        check(
            make, errors, F.scaled_dot_product_attention, native_attention, args, kwargs, **options
        )

    run(test)
