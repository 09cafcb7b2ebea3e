"""Random cases of each op against native and native in float64; fuzzing.py says how they are drawn."""

from contextlib import suppress

import pytest
import torch
from fuzzing import (
    DTYPES,
    FEATURES,
    NATIVE,
    SIDE,
    SIZE,
    SMALL,
    SPECIAL,
    Maker,
    aligned,
    check,
    draw_loss_options,
    each_dtype,
    random_labels,
    run,
)
from hypothesis import strategies as st
from native_suites import gelu_of_infinity
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import warpwright.functional as F
from warpwright import _native, _quantized_weight
from warpwright.testing import assert_same

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
pytestmark = pytest.mark.timeout(3600)


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


def native_max_pool2d(x, *args, **kwargs):
    """In channels_last, native's CUDA kernel gives index 0 to every window of -inf alone."""
    where = "cpu" if x.is_cuda and (x == float("-inf")).any() else x.device
    result = NATIVE.max_pool2d(x.to(where), *args, **kwargs)
    return tree_map(lambda t: t.to(x.device), result)


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
        check(make, errors, F.max_pool2d, native_max_pool2d, args, kwargs)

    run(test)


@each_dtype
def test_adaptive_avg_pool2d(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        shape = (draw(SMALL), draw(SIZE), draw(SIDE), draw(SIDE))[draw(st.integers(0, 1)) :]
        # Other sizes are native's, whose gradient is not the same in every run.
        args = (make(*shape), draw(st.sampled_from((1, (1, 1)))))
        # Native multiplies by a rounded 1 / count, so its float64 result is not the exact one.
        is_exact = dtype != torch.float64
        check(
            make,
            errors,
            F.adaptive_avg_pool2d,
            NATIVE.adaptive_avg_pool2d,
            args,
            sums_only=is_exact,
        )

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
def test_linear_quantized(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        batch = draw(st.lists(SMALL, max_size=2)) + draw(st.lists(SIZE, max_size=1))
        outputs, groups, group = draw(FEATURES), draw(st.integers(1, 3)), draw(st.integers(1, 40))
        columns = groups * group
        codes = torch.randint(256, (outputs, columns), dtype=torch.uint8, device=device)
        # Powers of two: products of integers stay exact.
        exponents = torch.randint(-2, 2, (outputs, groups), device=device)
        scales, zeros = (2.0**exponents).to(dtype), None
        features = 2 * columns
        if draw(st.booleans()):
            codes, scales, features = codes.char(), scales[:, 0].contiguous(), columns
        elif draw(st.booleans()):
            zeros = torch.randint(16, (outputs, groups), dtype=torch.uint8, device=device)
        args = (make(*batch, features), codes, scales, zeros, make.maybe(outputs))
        check(make, errors, F.linear_quantized, _quantized_weight.linear_quantized, args)

    run(test)


@each_dtype
def test_attention_varlen(device, dtype):
    """Lengths, windows and groups of heads; native's with a dense mask."""
    few = st.integers(1, 3)

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        lengths = st.lists(st.integers(0, 70), min_size=1, max_size=5)
        queries = draw(lengths)
        keys = draw(st.lists(st.integers(0, 70), min_size=len(queries), max_size=len(queries)))
        gap, kv_heads, group = draw(st.integers(0, 3)), draw(few), draw(few)
        columns, others = (draw(st.sampled_from([1, 8, 16, 40, 64, 128, 136])) for _ in range(2))
        ends = [torch.tensor([gap, *x]).cumsum(0).int().to(device) for x in (queries, keys)]
        operands = (
            make(2 * gap + sum(queries), kv_heads * group, columns),
            make(2 * gap + sum(keys), kv_heads, columns),
            make(2 * gap + sum(keys), kv_heads, others),
        )
        side = st.one_of(st.none(), st.integers(0, 80))
        options = (max(queries), max(keys), draw(st.booleans()), None, draw(side), draw(side))

        def first(function):
            return lambda *args: function(*args)[0]

        check(
            make,
            errors,
            first(torch.ops.warpwright.attention_varlen),
            first(_native.attention_varlen),
            (*operands, *ends, *options),
            amplifies=True,  # as scaled_dot_product_attention: native is exact where all keys are equal
            cancels=max(1.0, others**0.5),  # sums over the columns of value; with one key all of it
        )

    run(test)


@each_dtype
def test_attention_with_kv_cache(device, dtype):
    """Lengths, pages and groups of heads; native's on the gathered pages."""
    few = st.integers(1, 3)

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=("normal",))
        batch, tokens, kv_heads, group = draw(st.integers(0, 3)), draw(few), draw(few), draw(few)
        columns = draw(st.sampled_from([1, 3, 8, 16, 40, 64, 72, 128, 136, 264]))
        page, pages = draw(st.sampled_from([None, 1, 3, 16])), draw(few)
        room = draw(st.integers(1, 90)) if page is None else page * pages
        lengths = torch.tensor(draw(st.lists(st.integers(0, room), min_size=batch, max_size=batch)))
        table = None
        if page is not None:
            table = torch.randint(7, (batch, pages)).int().to(device)
        shape = (batch, room) if page is None else (7, page)
        query = make(batch, tokens, kv_heads * group, columns, grad=False)
        cache = [
            make(*shape, kv_heads, columns, grad=False, arrange=False).contiguous()
            for _ in range(2)
        ]
        options = (lengths.int().to(device), table, 0, draw(st.booleans()))
        check(
            make,
            errors,
            torch.ops.warpwright.attention_with_kv_cache,
            lambda *args: _native.attention_with_kv_cache(*aligned(args)),
            (query, *cache, *options),
        )

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
def test_conv_transpose2d(device, dtype):
    channels = st.sampled_from([1, 2, 3, 4, 8, 9, 16])
    exactly = ("normal", "normal", "integer")

    def test(draw, errors):
        make = Maker(draw, device, dtype, kinds=exactly)
        groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
        c_in, c_out = draw(channels), draw(channels)
        shape = (draw(st.sampled_from([0, 1, 2, 3])), groups * c_in, draw(SIDE), draw(SIDE))
        kernel = [draw(st.integers(1, 4)) for _ in range(2)]
        # Windows that tile the output are half of the cases.
        tiles = draw(st.booleans())
        stride = kernel if tiles else [draw(st.integers(1, 3)) for _ in range(2)]
        dilation = [1 if tiles else draw(st.integers(1, 3)) for _ in range(2)]
        more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        args = (
            make(*shape[draw(st.integers(0, 1)) :]),
            make(groups * c_in, c_out, *kernel),
            make.maybe(groups * c_out),
            stride,
            # Native raises for an output without pixels, by the message of its kernel.
            [0 if tiles else draw(st.integers(0, d * (k - 1) // 2))
             for k, d in zip(kernel, dilation, strict=True)],
            [0, 0] if tiles and draw(st.booleans()) else more,
            groups,
            dilation,
        )  # fmt: skip
        check(make, errors, F.conv_transpose2d, NATIVE.conv_transpose2d, args)

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
            target = random_labels(c, rows, ignore, device)
        kwargs = draw_loss_options(draw, c, device, dtype)
        if not target.is_floating_point():
            kwargs["ignore_index"] = ignore
        args = (make(*shape), target)
        check(make, errors, F.cross_entropy, NATIVE.cross_entropy, args, kwargs, amplifies=True)

    run(test)


@each_dtype
def test_activations(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        x = make(*draw(st.lists(SIZE, max_size=3)))
        name = draw(st.sampled_from(["gelu", "silu", "sigmoid", "tanh"]))
        native = gelu_of_infinity if name == "gelu" else getattr(NATIVE, name)
        options = {"sums_only": False, "amplifies": True}
        check(make, errors, getattr(F, name), native, (x,), **options)

    run(test)


@each_dtype
def test_embedding(device, dtype):
    def test(draw, errors):
        make = Maker(draw, device, dtype)
        rows = draw(st.sampled_from([1, 2, 5, 33, 1025, 2100]))
        columns = draw(st.sampled_from([1, 3, 8, 24, 130, 264]))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 7, 33, 70]), min_size=0, max_size=2))
        indices = torch.randint(rows, shape, device=device)
        if draw(st.booleans(), label="repeated"):
            indices[torch.rand(shape, device=device) < 0.7] = rows // 2
        indices = indices.to(draw(st.sampled_from([torch.int32, torch.int64])))
        if indices.dim() > 1 and draw(st.booleans(), label="transposed"):
            indices = indices.transpose(0, 1)
        padding = draw(st.sampled_from([None, 0, -1, rows - 1]))
        args = (indices, make(rows, columns))
        kwargs = {"padding_idx": padding}
        check(make, errors, F.embedding, NATIVE.embedding, args, kwargs)

    run(test)


def native_attention(*args, **kwargs):
    """Native; by its formula if its CUDA kernels (torch 2.11.0) do not take the call.

    They raise for some strides, and end the process's context for operands off 16 bytes (which get
    copies) and for a mask that alone needs a gradient: the forward saves no log-sum-exp then, the
    backward reads one (pytorch/pytorch#148476).
    """
    args, kwargs = aligned((args, kwargs))
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
        # No NaN: a row of NaN scores is NaN here, native's CPU kernel makes it zero. Only in q,
        # without gradients and without a mask: ours leaves masked keys out, native adds -inf to
        # their scores or multiplies them by zero. test_attention.py has hidden keys that are not finite.
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
        masks = ["none"] if make.kind == "special" else ["none", "causal", "bool", "float"]
        mask = draw(st.sampled_from(masks))
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
