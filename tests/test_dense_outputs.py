"""Outputs and gradients are dense whatever the strides of the inputs are, with native's values."""

import pytest
import torch

import warpwright.functional as F

NATIVE = torch.nn.functional


def is_dense(x):
    """Each element has memory of its own, with no gap between them."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def overlapping(sizes, device):
    """Every stride 1: neighbours in any direction share elements."""
    memory = torch.randn(sum(sizes) + 1, device=device)
    return memory.as_strided(sizes, [1] * len(sizes))


def windows(sizes, device):
    """Overlapping windows of the last dimension, as unfold makes them."""
    *lead, rows, cols = sizes
    return torch.randn(*lead, rows + cols - 1, device=device).unfold(-1, cols, 1)


def expanded(dim):
    def make(sizes, device):
        sizes = list(sizes)
        kept = [1 if d == dim % len(sizes) else size for d, size in enumerate(sizes)]
        return torch.randn(kept, device=device).expand(sizes)

    return make


def permuted(sizes, device):
    return torch.randn(*reversed(sizes), device=device).permute(*reversed(range(len(sizes))))


def rows_last(sizes, device):
    """channels_last for four dimensions."""
    order = [0, *range(2, len(sizes)), 1]
    back = [order.index(d) for d in range(len(sizes))]
    return torch.randn([sizes[d] for d in order], device=device).permute(back)


def sliced(sizes, device):
    return torch.randn(*(2 * size for size in sizes), device=device)[
        tuple([slice(None, None, 2)] * len(sizes))
    ]


LAYOUTS = {
    "overlapping": overlapping,
    "windows": windows,
    "expanded_first": expanded(0),
    "expanded_second": expanded(1),
    "expanded_last": expanded(-1),
    "permuted": permuted,
    "rows_last": rows_last,
    "sliced": sliced,
    "scalar": lambda sizes, device: torch.randn((), device=device).expand(sizes),
}


def calls(make, device):
    """name -> (ours, native, inputs that get a gradient)"""
    x = (2, 3, 6, 5)
    w, b = torch.randn(4, 3, 3, 2, device=device), torch.randn(4, device=device)
    weight, bias = torch.rand(3, device=device), torch.randn(3, device=device)
    labels = torch.tensor([1, 0], device=device)
    pixels = torch.randint(3, (2, 6, 5), device=device)
    norm = {"training": True}

    def both(name, *args, **kwargs):
        return [lambda t, f=f: getattr(f, name)(t, *args, **kwargs) for f in (F, NATIVE)]

    def attention(name):
        def call(functions, t):
            q, k, v = (torch.randn(2, 3, n, 8, device=device) for n in (5, 6, 6))
            operands = {"query": q, "key": k, "value": v, name: t}
            return functions.scaled_dot_product_attention(*operands.values())

        def seeded(functions):
            def function(t):
                torch.manual_seed(0)
                return call(functions, t)

            return function

        return [seeded(F), seeded(NATIVE)]

    return {
        "relu": (both("relu"), x),
        "batch_norm": (both("batch_norm", None, None, weight, bias, **norm), x),
        "batch_norm_relu": (
            [
                lambda t: F.batch_norm_relu(t, None, None, weight, bias, **norm),
                lambda t: NATIVE.relu(NATIVE.batch_norm(t, None, None, weight, bias, **norm)),
            ],
            x,
        ),
        "max_pool2d": (both("max_pool2d", 2), x),
        "adaptive_avg_pool2d": (both("adaptive_avg_pool2d", 1), x),
        "conv2d": (both("conv2d", w, b), x),
        "conv_transpose2d": (
            both("conv_transpose2d", torch.randn(3, 4, 2, 2, device=device), b),
            x,
        ),
        "linear": (both("linear", torch.randn(4, 5, device=device)), x),
        "linear_gelu": (
            [
                lambda t: F.linear_gelu(t, torch.ones(4, 5, device=device)),
                lambda t: NATIVE.gelu(NATIVE.linear(t, torch.ones(4, 5, device=device))),
            ],
            x,
        ),
        "cross_entropy": (both("cross_entropy", labels), (2, 3)),
        "cross_entropy_pixels": (both("cross_entropy", pixels, reduction="none"), x),
        **later_calls(both, device),
        "query": (attention("query"), (2, 3, 5, 8)),
        "key": (attention("key"), (2, 3, 6, 8)),
        "value": (attention("value"), (2, 3, 6, 8)),
        "query_of_two_dimensions": (both("scaled_dot_product_attention", *two(device)), (5, 8)),
    }


def later_calls(both, device):
    """Of ops with one tensor whose layout may be anything; native's functions are torch's or chains."""
    x, norm = (2, 3, 6, 5), {"training": True}
    small, scales = torch.randn(3, 3, device=device), torch.rand(3, device=device) + 0.5
    bias, other = torch.randn(3, device=device), torch.randn(2, 3, 6, 5, device=device)
    taps, tables = torch.randn(4, 3, 3, 2, device=device), torch.randn(2, 1, 6, 4, device=device)
    table = torch.tensor([4, 0, 4, 2], device=device)
    codes = torch.arange(20, device=device).view(4, 5).to(torch.int8)
    packed = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)

    def in_torch(name, *args):
        return [lambda t, f=f: getattr(f, name)(t, *args) for f in (F, torch)]

    def rotated(t):
        first, second = t[..., :4].chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return torch.cat((t[..., :4] * tables[0] + turned * tables[1], t[..., 4:]), -1)

    def excited(t):
        hidden = NATIVE.relu(t.mean((2, 3)) @ small.T)
        return t * (hidden @ small.T).sigmoid()[..., None, None]

    def varlen(t):
        parts = [t[:2], t[2:]]
        parts = [p.transpose(0, 1).unsqueeze(0) for p in parts]
        outs = [NATIVE.scaled_dot_product_attention(p, p, p) for p in parts]
        return torch.cat([o.squeeze(0).transpose(0, 1) for o in outs])

    convolved = {"norm_weight": None, "norm_bias": None, **norm}
    return {
        **{name: (in_torch(name), x) for name in ("sigmoid", "tanh")},
        **{name: (in_torch(name, 1), x) for name in ("cumsum", "cumprod", "logcumsumexp")},
        **{name: (in_torch(name, (0, 2)), x) for name in REDUCTIONS},
        **{name: (both(name), x) for name in ("gelu", "silu", "instance_norm")},
        **{name: (both(name, 1), x) for name in ("softmax", "log_softmax")},
        "layer_norm": (both("layer_norm", (6, 5)), x),
        "rms_norm": (both("rms_norm", (5,), None, 1e-5), x),
        "group_norm": (both("group_norm", 3, scales, bias), x),
        "add_layer_norm": (
            [
                lambda t: F.add_layer_norm(t, other, (5,))[1],
                lambda t: NATIVE.layer_norm(other + t, (5,)),
            ],
            x,
        ),
        "add_rms_norm": (
            [
                lambda t: F.add_rms_norm(other, t, (5,), None, 1e-5)[1],
                lambda t: NATIVE.rms_norm(other + t, (5,), None, 1e-5),
            ],
            x,
        ),
        "swiglu": ([lambda t: F.swiglu(t, other), lambda t: NATIVE.silu(t) * other], x),
        "geglu packed": (
            [F.geglu, lambda t: NATIVE.gelu(t[..., :2]) * t[..., 2:]],
            (2, 3, 6, 4),
        ),
        "layer_scale_add": (
            [
                lambda t: F.layer_scale_add(t, other, scales[:, None, None]),
                lambda t: other + scales[:, None, None] * t,
            ],
            x,
        ),
        "rotary_embedding": (
            [lambda t: F.rotary_embedding(t, other, *tables)[0], rotated],
            x,
        ),
        "squeeze_excitation": (
            [lambda t: F.squeeze_excitation(t, small, None, small, None), excited],
            x,
        ),
        "embedding": (
            [lambda t: F.embedding(table, t), lambda t: NATIVE.embedding(table, t)],
            (7, 5),
        ),
        "linear_scan": (
            [lambda t: F.linear_scan(torch.ones_like(t), t, dim=2), lambda t: torch.cumsum(t, 2)],
            x,
        ),
        "fft_conv2d": ([lambda t: F.fft_conv2d(t, taps), lambda t: NATIVE.conv2d(t, taps)], x),
        "linear_quantized": (
            [
                lambda t: F.linear_quantized(t, codes, torch.ones(4, device=device) / 8),
                lambda t: NATIVE.linear(t, codes.to(t) / 8),
            ],
            x,
        ),
        "attention_varlen": (
            [lambda t: F.attention_varlen(t, t, t, packed, packed, 3, 3), varlen],
            (5, 3, 8),
        ),
        "relu_max_pool2d": (
            [lambda t: F.relu_max_pool2d(t, 2), lambda t: NATIVE.max_pool2d(NATIVE.relu(t), 2)],
            x,
        ),
        "batch_norm_silu": (
            [
                lambda t: F.batch_norm_silu(t, None, None, **norm),
                lambda t: NATIVE.silu(NATIVE.batch_norm(t, None, None, **norm)),
            ],
            x,
        ),
        "conv2d_batch_norm": (
            [
                lambda t: F.conv2d_batch_norm(t, taps, **convolved),
                lambda t: NATIVE.batch_norm(NATIVE.conv2d(t, taps), None, None, **norm),
            ],
            x,
        ),
    }


REDUCTIONS = ("sum", "mean", "amax", "logsumexp", "var", "std")


def two(device):
    return torch.randn(6, 8, device=device), torch.randn(6, 8, device=device)


NAMES = list(calls(overlapping, "cpu"))
ATTENTION = ("query", "key", "value", "query_of_two_dimensions")
LATER = later_calls(lambda *a, **k: None, "cpu")  # orders differ from those of native's chains


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_dense(device, name, layout):
    (ours, native), sizes = calls(LAYOUTS[layout], device)[name]
    x = LAYOUTS[layout](sizes, device).requires_grad_()
    # Native itself returns uninitialised memory for overlapping queries: a copy is its input.
    dense = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    expected, output = native(dense), ours(x)
    cotangent = torch.randn_like(output, memory_format=torch.contiguous_format)
    (gradient,) = torch.autograd.grad(output, x, cotangent)
    (expected_gradient,) = torch.autograd.grad(expected, dense, cotangent)
    assert is_dense(output)
    if name not in ("sum", "mean"):  # a view that repeats the gradient from above, as native's
        assert is_dense(gradient)
    # A constant image has no variance: batch norm multiplies rounding errors by 1 / sqrt(eps) = 316.
    atol = 1e-3 if layout == "scalar" and "batch_norm" in name else 1e-4
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=atol)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)
    picks = device == "cuda" and name in ATTENTION  # a kernel by the case, and so the order
    if is_dense(x) and not picks and name not in LATER:
        assert output.stride() == native(x).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["relu", "batch_norm", "max_pool2d", "adaptive_avg_pool2d", "conv2d", "linear"]
)
def test_meta_agrees(device, name, layout):
    (ours, _), sizes = calls(LAYOUTS[layout], device)[name]
    (on_meta, _), _ = calls(LAYOUTS[layout], "meta")[name]
    x = LAYOUTS[layout](sizes, device)
    fake = torch.empty_strided(sizes, x.stride(), device="meta")
    assert on_meta(fake).stride() == ours(x).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_agrees_in_attention(device, layout):
    ops = torch.ops.warpwright
    q, k, v = (LAYOUTS[layout]((2, 3, n, 8), device) for n in (5, 6, 6))
    wanted = [True, True, True, False]

    def run(q, k, v):
        out, lse, state = ops.attention(q, k, v, None, 0.0, False, None)
        grads = ops.attention_backward(
            torch.ones_like(out), q, k, v, None, out, lse, state, 0.0, False, None, wanted
        )
        return [out.stride(), lse.stride(), *(g.stride() for g in grads[:3])]

    fake = (torch.empty_strided(t.shape, t.stride(), device="meta") for t in (q, k, v))
    assert run(q, k, v) == run(*fake)


def test_overlapping_queries_as_a_user_makes_them(device):
    """Uninitialised memory came back: empty_like put the windows' dimension innermost."""
    q = torch.randn(2, 12, device=device).unfold(-1, 8, 1)
    k, v = torch.randn(2, 6, 8, device=device), torch.randn(2, 6, 8, device=device)
    expected = NATIVE.scaled_dot_product_attention(q.contiguous(), k, v)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
