"""Random cases of the row norms and of the fused ops, whose oracle is native's chain of functions."""

import math
import os

import pytest
import torch
from batch_norm_relu_cases import exact_hardswish
from fuzzing import (
    FEATURES,
    NATIVE,
    SIDE,
    SIZE,
    SMALL,
    Maker,
    aligned,
    check,
    draw_loss_options,
    each_dtype,
    random_labels,
    run,
)
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import warpwright.functional as F
from warpwright import _native

CASES = int(os.environ.get("WARPWRIGHT_FUZZ_CASES", "2000"))
# A case is a chain of native functions, run three times. With fewer cases than the other random tests
# have, luck decides on the typical error.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def native_rms_norm(x, *args, **kwargs):
    """On a GPU native takes the mean square from Welford's formula, which is NaN for an infinity."""
    where = "cpu" if x.is_cuda and x.isinf().any() else x.device
    args = tree_map(lambda t: t.to(where) if isinstance(t, torch.Tensor) else t, args)
    return NATIVE.rms_norm(x.to(where), *args, **kwargs).to(x.device)


@each_dtype
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_row_norms(device, dtype, name):
    native = native_rms_norm if name == "rms_norm" else NATIVE.layer_norm

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal", "normal", "special"))
        rows = draw(st.lists(SMALL, max_size=2))
        # The gradient of a row of two cancels to zero for any input: either side has only rounding left.
        shapes = st.lists(st.one_of(FEATURES, SMALL), min_size=1, max_size=2)
        shape = draw(shapes.filter(lambda sizes: name == "rms_norm" or math.prod(sizes) != 2))
        args = [make(*rows, *shape), shape, make.maybe(*shape, special=False)]
        # Native's layer_norm keeps 1 / sqrt(var + eps) in float16, where it is infinite for a small eps.
        small = [] if dtype == torch.float16 else [1e-12]
        kwargs = {"eps": draw(st.sampled_from([1e-5, 0.1, *small]))}
        if name == "layer_norm":
            args.append(make.maybe(*shape, special=False))
        elif draw(st.booleans(), label="no eps"):
            kwargs = {"eps": None}
        options = {"sums_only": False, "amplifies": True}
        check(make, errors, getattr(F, name), native, args, kwargs, **options)

    run(test, CASES)


@each_dtype
def test_rotary_embedding(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal", "normal", "integer"))
        batch, tokens, width = draw(SMALL), draw(SMALL), draw(FEATURES)
        heads = [draw(SMALL), draw(SMALL)]
        size = 2 * draw(st.integers(0, width // 2))
        query, key = (make(batch, n, tokens, width) for n in heads)
        batches = st.sampled_from([1, batch])
        cos, sin = (make(draw(batches), tokens, size, grad=False) for _ in range(2))
        kwargs = {"interleaved": draw(st.booleans())}

        def joined(function):
            return lambda *a, **k: torch.cat([x.flatten() for x in function(*a, **k)])

        forms = joined(F.rotary_embedding), joined(_native.rotary_embedding)
        options = {"sums_only": False, "amplifies": True}
        check(make, errors, *forms, (query, key, cos, sin), kwargs, **options)

    run(test, CASES)


@each_dtype
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_add_norms(device, dtype, name):
    """Both results, joined, so that both have gradients. Native's sum keeps the operands' layout."""

    def together(x, residual, *args):
        return torch.stack(getattr(F, name)(x, residual, *args))

    def apart(x, residual, *args):
        total = residual + x
        return torch.stack((total, getattr(NATIVE, name.removeprefix("add_"))(total, *args)))

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        rows = draw(st.lists(SMALL, max_size=2))
        shape = draw(st.lists(st.one_of(FEATURES, SMALL), min_size=1, max_size=2))
        vectors = [make.maybe(*shape)] + ([make.maybe(*shape)] if "layer" in name else [])
        args = (make(*rows, *shape), make(*rows, *shape), shape, *vectors, 0.1)
        options = {"sums_only": False, "amplifies": True, "strides": False}
        check(make, errors, together, apart, args, {}, **options)

    run(test, CASES)


ACTIVATIONS = {"linear_relu": NATIVE.relu, "linear_gelu": NATIVE.gelu, "linear_silu": NATIVE.silu}


def gelu_without_cancellation(z, approximate):
    """An oracle in float64: native's 1 + erf and 1 + tanh lose digits for negative z."""
    if approximate == "none":
        return 0.5 * z * torch.erfc(-z * math.sqrt(0.5))
    argument = math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)
    # On either side the sigmoid is the small one: its derivative s (1 - s) loses no digits.
    return torch.where(z < 0, z * torch.sigmoid(argument), z - z * torch.sigmoid(-argument))


@each_dtype
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear_activation(device, dtype, name):
    activation = ACTIVATIONS[name]

    def test(draw, errors):
        # A relu of a sum close to zero has either gradient: exact values there.
        kinds = ("integer",) if name == "linear_relu" else ("normal", "integer")
        make = Maker(draw, device, dtype, kinds=kinds)
        rows = draw(st.lists(SMALL, max_size=2))
        k, n = draw(FEATURES), draw(FEATURES)
        args = (make(*rows, k), make(n, k), make.maybe(n))
        kwargs = {}
        if name == "linear_gelu":
            kwargs["approximate"] = draw(st.sampled_from(["none", "tanh"]))

        def native(x, w, b, **options):
            z = NATIVE.linear(x, w, b)
            if z.dtype == torch.float64 and name == "linear_gelu":
                return gelu_without_cancellation(z, **options)
            return activation(z, **options)

        options = {"sums_only": name == "linear_relu", "amplifies": True}
        check(make, errors, getattr(F, name), native, args, kwargs, **options)

    run(test, CASES)


@each_dtype
def test_squeeze_excitation(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        some = FEATURES.filter(bool)
        n, c, s = draw(SMALL), draw(some), draw(some)
        h, w = draw(SMALL), draw(SMALL)
        args = (make(n, c, h, w), make(s, c), make.maybe(s), make(c, s), make.maybe(c))

        def native(x, w1, b1, w2, b2, activation="relu", scale_activation="sigmoid"):
            hidden = NATIVE.linear(x.mean((2, 3)), w1, b1)
            scale = NATIVE.linear(getattr(NATIVE, activation)(hidden), w2, b2)
            return getattr(NATIVE, scale_activation)(scale)[..., None, None] * x

        kwargs = {"activation": draw(st.sampled_from(["relu", "silu"]))}
        options = {"sums_only": False, "amplifies": True}
        check(make, errors, F.squeeze_excitation, native, args, kwargs, **options)

    run(test, CASES)


@each_dtype
def test_layer_scale_add(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        if draw(st.booleans(), label="image"):
            shape = (draw(SMALL), draw(FEATURES), draw(SMALL), draw(SMALL))
            of_channels = (shape[1], 1, 1)
        else:
            shape = (draw(SMALL), *draw(st.lists(SMALL, max_size=1)), draw(FEATURES))
            of_channels = shape[-1:]
        wide = torch.float32 if dtype.itemsize == 2 and draw(st.booleans(), label="wide") else dtype
        args = [make(*shape), make(*shape, dtype=wide), make(*of_channels, dtype=wide)]
        args.append(make.maybe(shape[0], *(1,) * (len(shape) - 1), grad=False))

        def native(x, residual, scale, sample_scale):
            scaled = scale * x
            return residual + (scaled if sample_scale is None else scaled * sample_scale)

        check(make, errors, F.layer_scale_add, native, args)

    run(test, CASES)


@each_dtype
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activation(device, dtype, name):
    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal", "normal", "integer"))
        shape = (*draw(st.lists(SMALL, max_size=2)), draw(FEATURES))
        packed = draw(st.booleans(), label="packed")
        args = (make(*shape[:-1], 2 * shape[-1]),) if packed else (make(*shape), make(*shape))
        kwargs = {}
        if name == "geglu":
            kwargs["approximate"] = draw(st.sampled_from(["none", "tanh"]))

        def native(gate, up=None, **options):
            if up is None:
                gate, up = gate.chunk(2, -1)
            if name == "swiglu":
                return NATIVE.silu(gate) * up
            if gate.dtype == torch.float64:
                return gelu_without_cancellation(gate, **options) * up
            return NATIVE.gelu(gate, **options) * up

        options = {"sums_only": False, "amplifies": True}
        check(make, errors, getattr(F, name), native, args, kwargs, **options)

    run(test, CASES)


def windows(draw):
    """kernel_size, stride, padding, dilation, ceil_mode that native's backward can take."""
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, kernel // 2)) if dilation == 1 else 0
    ceil_mode = dilation == 1 and draw(st.booleans())
    return kernel, draw(st.integers(1, 3)), padding, dilation, ceil_mode


@each_dtype
def test_relu_max_pool2d(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        shape = (draw(SMALL), draw(SIZE), draw(SIDE), draw(SIDE))[draw(st.integers(0, 1)) :]

        def native(x, *window):
            return NATIVE.max_pool2d(NATIVE.relu(x), *window)

        check(make, errors, F.relu_max_pool2d, native, (make(*shape), *windows(draw)))

    run(test, CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *("batch_norm_relu", "batch_norm_add_relu", "batch_norm_relu_max_pool2d"),
        *("batch_norm_silu", "batch_norm_hardswish"),
    ],
)
def test_batch_norm_chain(device, dtype, name):
    """In the long types alone: a rounded sum close to zero may have either gradient."""

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        c = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17]))
        shape = (draw(st.sampled_from([1, 2, 3])), c, draw(SIDE), draw(SIDE))
        training = draw(st.booleans())
        given = not training or draw(st.booleans(), label="statistics")
        mean = make(c, grad=False, arrange=False) if given else None
        var = torch.rand(c).to(device, dtype) + 0.25 if given else None
        weight, bias = make.maybe(c), make.maybe(c)
        if device == "cuda" and weight is None:
            bias = None  # native's gradient is zero there, or an internal error
        head = [make(*shape)] + ([make(*shape)] if name == "batch_norm_add_relu" else [])
        norm = (mean, var, weight, bias, training, 0.1, draw(st.sampled_from([1e-5, 0.1])))
        window = windows(draw) if name == "batch_norm_relu_max_pool2d" else ()

        def native(x, *rest):
            residual, *rest = rest if name == "batch_norm_add_relu" else (0, *rest)
            kind = name.split("_")[2].replace("add", "relu")
            activation = exact_hardswish if kind == "hardswish" else getattr(NATIVE, kind)
            y = activation(NATIVE.batch_norm(*aligned((x, *rest[:7]))) + residual)
            return NATIVE.max_pool2d(y, *rest[7:]) if window else y

        args = (*head, *norm, *window)
        check(make, errors, getattr(F, name), native, args, amplifies=True, strides=False)

    run(test, CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_first_layer(device, dtype):
    """Most cases are such that the GPU's kernels take them: few elements, a pool of 2x2."""

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        c, size = draw(st.sampled_from([(1, 3), (1, 5), (3, 3), (2, 3), (1, 2)]))
        k, padding = draw(st.sampled_from([4, 8, 12, 36, 5])), draw(st.integers(0, 2))
        n, h, w = draw(SMALL), draw(st.integers(size + 1, 40)), draw(st.integers(size + 1, 75))
        x = make(n, c, h, w, grad=draw(st.integers(0, 3)) == 0)
        weight, norm_weight, norm_bias = make(k, c, size, size), make.maybe(k), make.maybe(k)
        if device == "cuda" and norm_weight is None:
            norm_bias = None  # as in test_batch_norm_chain
        # Without a gradient: batch norm subtracts a bias, and native's is rounding alone.
        bias = draw(st.sampled_from([None, make(k, grad=False)]))
        window = windows(draw) if draw(st.integers(0, 3)) == 0 else (2, 2, 0, 1, False)
        eps = draw(st.sampled_from([1e-5, 0.1]))

        def ours(x, weight, bias, norm_weight, norm_bias):
            names = (
                "pool_kernel_size",
                "pool_stride",
                "pool_padding",
                "pool_dilation",
                "ceil_mode",
            )
            norm = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": eps}
            options = dict(zip(names, window, strict=True)) | norm
            return F.conv2d_batch_norm_relu_max_pool2d(
                x, weight, bias, 1, padding, training=True, **options
            )

        def native(x, weight, bias, norm_weight, norm_bias):
            y = NATIVE.conv2d(x, weight, bias, 1, padding)
            y = NATIVE.batch_norm(y, None, None, norm_weight, norm_bias, True, 0.1, eps)
            return NATIVE.max_pool2d(NATIVE.relu(y), *window)

        args = (x, weight, bias, norm_weight, norm_bias)
        check(make, errors, ours, native, args, amplifies=True, strides=False)

    run(test, CASES)


@each_dtype
def test_linear_cross_entropy(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        # Native's float16 sums over rows and classes may overflow.
        most = 33 if dtype == torch.float16 else 129
        classes = draw(st.sampled_from([n for n in (1, 2, 3, 7, 33, 129) if n <= most]))
        rows, k = draw(SIZE), draw(FEATURES.filter(lambda n: n <= most))
        ignore = draw(st.sampled_from([-100, 0, 1]))
        target = random_labels(classes, (rows,), ignore, device)
        kwargs = {
            "ignore_index": ignore,
            **draw_loss_options(draw, classes, device, dtype),
        }
        bias = make.maybe(classes)
        chunk = draw(st.sampled_from([1, 2, 5, 64]))

        def ours(x, w, b, t, weight, **options):
            options = {"class_weight": weight, "chunk_rows": chunk, **options}
            return F.linear_cross_entropy(x, w, t, b, **options)

        def native(x, w, b, t, **options):
            return NATIVE.cross_entropy(NATIVE.linear(x, w, b), t, **options)

        args = (make(rows, k), make(classes, k), bias, target)
        check(make, errors, ours, native, args, kwargs, amplifies=True)

    run(test, CASES)
