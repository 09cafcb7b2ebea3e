"""On a GPU: CUDA graphs, repeats next to other work, and more than 2^31 and 2^32 elements.

WARPWRIGHT_REPEATS: how many repeats (1,000 without it).
"""

import functools
import itertools
import os

import pytest
import torch
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright import optim
from warpwright.testing import assert_same

pytestmark = pytest.mark.gpu
REPEATS = int(os.environ.get("WARPWRIGHT_REPEATS", "1000"))
LAST, FIRST = torch.channels_last, torch.contiguous_format
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def random(*shape, dtype=BF16, memory_format=FIRST):
    x = torch.empty(shape, dtype=dtype, device="cuda", memory_format=memory_format)
    return x.normal_().requires_grad_()


def layer(rows, in_features, out_features, dtype):
    """A linear layer's input, weight and bias."""
    shapes = (rows, in_features), (out_features, in_features), (out_features,)
    return [random(*shape, dtype=dtype) for shape in shapes]


def labels(rows, classes):
    return torch.randint(classes, (rows,), device="cuda")


def in_training(norm):
    """norm(x, running_mean, running_var, weight, bias, training) as a function of (x, w, b)."""
    return lambda x, weight, bias, *window: norm(
        x, None, None, weight, bias, True, 0.1, 1e-5, *window
    )


def add_relu(x, *args):
    return F.batch_norm_add_relu(x, x.detach() * 0.5, *args)


def tf32_linear():
    torch.backends.cuda.matmul.allow_tf32 = True  # off again before the next test: conftest.py
    return F.linear


def split_tf32_linear():
    warpwright.set_float32_matmul_precision("high")  # as it was before the next test
    return F.linear


NORMS = {
    "batch_norm": in_training(F.batch_norm),
    "batch_norm_relu": in_training(F.batch_norm_relu),
    "batch_norm_silu": in_training(F.batch_norm_silu),
    "batch_norm_add_relu": in_training(add_relu),
    "batch_norm_relu_max_pool2d": lambda x, weight, bias: in_training(F.batch_norm_relu_max_pool2d)(
        x, weight, bias, 3, 2, 1
    ),
}
POOLS = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "relu_max_pool2d": lambda x: F.relu_max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
}


# ---- repeats ----


def variants():
    """(name, make): make() gives a function and its inputs; one for each kind of kernel."""
    vector = functools.partial(random, dtype=FP32)
    yield "relu", lambda: (F.relu, random(1 << 20))
    for fmt, where in ((FIRST, "nchw"), (LAST, "nhwc")):
        for dtype in (BF16, FP32):
            kind = f"{where}-{str(dtype).removeprefix('torch.')}"
            for name, norm in NORMS.items():
                # Fits on chip, does not; small planes on chip.
                for images, side in ((4, 28), (512, 28), (64, 7)):
                    x = functools.partial(random, images, 64, side, side, dtype=dtype)
                    yield (
                        f"{name}-{kind}-{images}x{side}",
                        lambda f=norm, x=x, m=fmt: (f, x(memory_format=m), vector(64), vector(64)),
                    )
            for name, pool in POOLS.items():
                x = functools.partial(random, 16, 64, 28, 28, dtype=dtype, memory_format=fmt)
                yield f"{name}-{kind}", lambda f=pool, x=x: (f, x())
            for channels in (1, 3, 64):
                yield (
                    f"conv2d-{kind}-{channels}",
                    lambda c=channels, d=dtype, m=fmt: (
                        functools.partial(F.conv2d, padding=1),
                        random(16, c, 28, 28, dtype=d, memory_format=m),
                        random(32, c, 3, 3, dtype=d, memory_format=m),
                        random(32, dtype=d),
                    ),
                )
    sizes = ((1024, 10), (512, 1000), (64, 50257), (32, 128256), (1600, 9001), (801, 50257))
    for rows, classes in sizes:
        for dtype in (BF16, FP32):
            yield (
                f"cross_entropy-{rows}x{classes}-{dtype}",
                lambda n=rows, c=classes, d=dtype: (
                    F.cross_entropy,
                    random(n, c, dtype=d),
                    labels(n, c),
                ),
            )
    for rows, classes in ((101400, 201), (25400, 1001), (3301, 9001)):  # a stream of rows
        loss = functools.partial(F.cross_entropy, reduction="none")
        yield (
            f"cross_entropy-{rows}x{classes}-each",
            lambda n=rows, c=classes, f=loss: (f, random(n, c), labels(n, c)),
        )
    for rows, classes, dtype in ((101400, 200, FP32), (25400, 1001, FP32), (26000, 1000, BF16)):
        yield (  # the same with the gradient
            f"cross_entropy-{rows}x{classes}-{dtype}",
            lambda n=rows, c=classes, d=dtype: (
                F.cross_entropy,
                random(n, c, dtype=d),
                labels(n, c),
            ),
        )
    soft = functools.partial(F.cross_entropy, label_smoothing=0.1)
    yield "cross_entropy-smoothed", lambda: (soft, random(512, 1000), labels(512, 1000))
    yield (
        "cross_entropy-probabilities",
        lambda: (soft, random(512, 1000), random(512, 1000).detach().softmax(1)),
    )
    each = functools.partial(soft, reduction="none")
    yield (
        "cross_entropy-smoothed-persistent",
        lambda: (each, random(25400, 1000), labels(25400, 1000)),
    )
    for side in (48, 512):  # classes are strided: one pixel per thread, and 16 bytes per thread
        yield (
            f"cross_entropy-planes-{side}",
            lambda s=side: (
                F.cross_entropy,
                random(4, 19, s, s),
                labels(4 * s * s, 19).view(4, s, s),
            ),
        )
    yield (
        "cross_entropy-float64",
        lambda: (F.cross_entropy, random(512, 1000, dtype=FP64), labels(512, 1000)),
    )
    yield "linear-float64", lambda: (F.linear, *layer(200, 264, 136, FP64))
    sizes = (512, 3136, 128), (760, 520, 760), (2048, 1024, 2048)
    kinds = {"tf32": tf32_linear, "3xtf32": split_tf32_linear}
    for (m, k, n), kind in itertools.product(sizes, kinds):
        yield (
            f"linear-{m}x{k}x{n}-{kind}",
            lambda s=(m, k, n), make=kinds[kind]: (make(), *layer(*s, FP32)),
        )
    products = {"linear": F.linear, "linear_relu": F.linear_relu, "linear_gelu": F.linear_gelu}
    for m, k, n in (
        (512, 3136, 128),
        (760, 520, 760),
        (8, 4096, 512),
        (384, 512, 1024),
        (999, 523, 1001),
        (90, 1096, 1032),
        (500, 1000, 10),
    ):
        for dtype in (BF16, FP32):
            for name, product in products.items():
                yield (
                    f"{name}-{m}x{k}x{n}-{dtype}",
                    lambda f=product, s=(m, k, n), d=dtype: (f, *layer(*s, d)),
                )
    capped = functools.partial(F.linear_cross_entropy, z_loss=0.01, softcap=2.0)
    yield (
        "linear_cross_entropy-extras",
        lambda: (capped, random(512, 256), random(5000, 256), labels(512, 5000)),
    )
    yield (
        "linear_cross_entropy",
        lambda: (F.linear_cross_entropy, random(512, 256), random(5000, 256), labels(512, 5000)),
    )
    for causal in (False, True):
        yield (
            f"attention-{causal}",
            lambda c=causal: (
                functools.partial(F.scaled_dot_product_attention, is_causal=c),
                *(random(2, 4, 300, 64) for _ in range(3)),
            ),
        )


def step_of(make):
    """Output and gradients, as a function without arguments."""
    function, *inputs = make()
    leaves = [t for t in inputs if t.requires_grad]
    cotangent = torch.randn_like(function(*inputs))

    def step():
        output = function(*inputs)
        return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]

    return step


EACH = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in variants()])


@EACH
def test_in_a_cuda_graph(make):
    """Captured, forward and backward give the bits of eager calls, on every replay."""
    step = step_of(make)
    expected = step()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(results, expected)


def assert_equal_repeats(step):
    """The same bits every time, while another stream keeps the SMs busy at its own pace."""
    first = step()
    assert not any(t.isnan().any() for t in first)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    beside, a = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=BF16)
    beside.wait_stream(torch.cuda.current_stream())
    for i in range(REPEATS):
        with torch.cuda.stream(beside):
            for _ in range(i % 4):
                torch.mm(a, a)
        for again, t in zip(step(), first, strict=True):
            wrong += (again != t).any()
    assert wrong.item() == 0


@EACH
def test_repeats(make):
    assert_equal_repeats(step_of(make))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.SGD, {}),
        (optim.SGD, {"momentum": 0.9, "nesterov": True, "max_norm": 1.0}),
        (optim.Adam, {"eps": 0.1, "amsgrad": True, "capturable": True}),
        (optim.AdamW, {"eps": 0.1, "fused": True, "max_norm": 1.0, "zero_grad_in_step": True}),
        (optim.AdamW, {"eps": 0.1, "master_weights": True}),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(x),
)
def test_repeats_of_steps_from_one_state(cls, options, dtype):
    sizes = (1_000_003, 4096, 5, 70_001)
    start, gradients = ([random(n, dtype=dtype).detach() for n in sizes] for _ in range(2))

    def steps():
        params = [p.clone().requires_grad_() for p in start]
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer = cls(params, lr=0.1, **options)
        optimizer.step()
        optimizer.step()
        state = [t for p in params for t in optimizer.state[p].values() if t is not None]
        return [*(p.detach() for p in params), *(t for t in state if t.is_cuda)]

    assert_equal_repeats(steps)


# ---- many elements ----


def large(gib):
    """Slow, and only if the GPU's memory holds it."""

    def decorate(test):
        test = pytest.mark.parametrize("elements", [2**31, 2**32], ids=["2^31", "2^32"])(test)
        return pytest.mark.slow(pytest.mark.gpu_memory(gib)(test))

    return decorate


def places(count, item):
    """Slices of three items at the start, over both seams and at the end of `count` items."""
    seams = [seam // item - 1 for seam in (2**31, 2**32)]
    starts = {0, count - 3, *(s for s in seams if 0 < s < count - 3)}
    return [slice(start, start + 3) for start in sorted(starts)]


def assert_same_on_slices(function, x, *others, same=assert_same):
    """`others` are cut like x."""
    y = function(x, *others)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    for at in places(len(x), x[0].numel()):
        part = x.detach()[at].requires_grad_()
        y_part = function(part, *(t[at] for t in others))
        same(y.detach()[at], y_part.detach(), f"output at {at}")
        (dx_part,) = torch.autograd.grad(y_part, part, dy[at])
        same(dx[at], dx_part, f"gradient at {at}")


def assert_nearly_same(a, b, what=None):
    torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-7)


@large(60)
def test_large_relu(elements):
    assert_same_on_slices(F.relu, random(elements // 2**20 + 3, 2**20))


@large(80)
@pytest.mark.parametrize("memory_format", [FIRST, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", POOLS)
def test_large_max_pool2d(elements, name, memory_format):
    count = elements // (64 * 33 * 31) + 3
    assert_same_on_slices(POOLS[name], random(count, 64, 33, 31, memory_format=memory_format))


@large(80)
def test_large_cross_entropy(elements):
    classes = 50257
    rows = elements // classes + 3
    loss = functools.partial(F.cross_entropy, reduction="none")
    # Few rows are cut up, and so added up, in another way.
    same = assert_nearly_same
    assert_same_on_slices(loss, random(rows, classes), labels(rows, classes), same=same)


@large(80)
def test_large_cross_entropy_of_pixels(elements):
    classes, side = 19, 512
    images = elements // (classes * side * side) + 3
    x, target = random(images, classes, side, side), labels(images * side * side, classes)
    loss = functools.partial(F.cross_entropy, reduction="none")
    assert_same_on_slices(loss, x, target.view(images, side, side))


@large(80)
def test_large_cross_entropy_with_its_gradient(elements):
    classes = 128256
    rows = elements // classes + 3
    x, target = random(rows, classes).detach(), labels(rows, classes)

    def gradient(x, target):
        """Of the sum, by the op itself: few rows would take the two passes."""
        sum_, nothing_ignored, smoothing = 2, -100, 0.1
        return torch.ops.warpwright.cross_entropy_forward_gradient(
            x, target, None, sum_, nothing_ignored, smoothing, x.dtype
        )[3]

    dx = gradient(x, target)
    for at in places(rows, classes):  # few rows are cut up, and so added up, in another way
        torch.testing.assert_close(dx[at], gradient(x[at], target[at]), rtol=1e-5, atol=1e-7)


@large(120)
@pytest.mark.parametrize("memory_format", [FIRST, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", NORMS)
def test_large_batch_norm(elements, name, memory_format):
    """Copies of one block: the statistics, and so the results, are the block's."""
    block = random(3, 64, 33, 31, memory_format=memory_format)
    copies = elements // block.numel() + 1
    # Normalised values stay below 12: the statistics' rounding decides no relu.
    weight = (0.5 + 0.5 * torch.rand(64, device="cuda")).requires_grad_()
    bias = torch.full((64,), 12.0, device="cuda")
    bias[::2] = -12
    bias.requires_grad_()

    def step(x, dy):
        y = NORMS[name](x, weight, bias)
        dy = torch.randn_like(y) if dy is None else dy
        return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)], dy

    def copied(t):
        whole = torch.empty(
            copies * len(t), *t.shape[1:], dtype=t.dtype, device="cuda", memory_format=memory_format
        )
        for first in range(0, len(whole), len(t)):
            whole[first : first + len(t)] = t
        return whole

    expected, dy = step(block, None)
    results, _ = step(copied(block.detach()).requires_grad_(), copied(dy))
    for result, one in zip(results[:2], expected[:2], strict=True):
        for at in places(len(result), block[0].numel()):
            part = result[at.start // 3 * 3 :][:3]
            wrong = (part - one).abs() > 2e-2 * (one.abs() + one.abs().max())
            # It may decide between two taps of a window.
            allowed = 1e-4 if "max_pool2d" in name else 0
            assert wrong.double().mean() <= allowed, f"{wrong.sum()} elements at {at}"
    for result, one in zip(results[2:], expected[2:], strict=True):
        slack = 1e-2 * one.abs().max().item()
        torch.testing.assert_close(result / copies, one, rtol=1e-2, atol=slack)


@large(40)
@pytest.mark.parametrize("name", ["linear", "linear_relu"])
def test_large_linear(elements, name):
    """Integers: exact in any order."""
    relu = name == "linear_relu"
    features, rows = 512, elements // 512 + 3
    integers = lambda *shape: torch.randint(-1, 2, shape, device="cuda", dtype=torch.int8)  # noqa: E731
    x = integers(rows, features).to(BF16).requires_grad_()
    weight = integers(40, features).to(BF16).requires_grad_()
    y = getattr(F, name)(x, weight)
    dy = integers(rows, 40).to(BF16)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    if relu:
        dy *= y.detach() > 0
    for at in places(rows, features):
        expected = nn.functional.linear(x.detach()[at], weight.detach())
        assert_same(y.detach()[at], expected.relu() if relu else expected)
        assert_same(dx[at], dy[at] @ weight.detach())
    expected = torch.zeros(40, features, dtype=torch.float64, device="cuda")
    for i in range(0, rows, 2**20):
        expected += (dy[i : i + 2**20].T.float() @ x.detach()[i : i + 2**20].float()).double()
    assert_same(dw, expected.to(BF16))


@large(100)
@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW])
def test_large_step(elements, cls):
    options = {"momentum": 0.9} if cls is optim.SGD else {}
    parameter = torch.randn(elements + 5, device="cuda", requires_grad=True)
    gradient = torch.randn(1_000_003, device="cuda")
    parts = [
        (at, parameter.detach()[at].clone().requires_grad_())
        for at in (slice(start - 700, start + 700) for start in (2**31, 2**32))
        if at.stop <= len(parameter)
    ]
    parts += [
        (at, parameter.detach()[at].clone().requires_grad_())
        for at in (slice(0, 1000), slice(elements - 1000, elements + 5))
    ]
    parameter.grad = torch.empty_like(parameter)
    for i in range(0, len(parameter), len(gradient)):
        piece = parameter.grad[i : i + len(gradient)]
        piece.copy_(gradient[: len(piece)])
    for at, part in parts:
        part.grad = parameter.grad[at].clone()
    for tensors in ([parameter], [part for _, part in parts]):
        optimizer = cls(tensors, lr=0.1, **options)
        optimizer.step()
        optimizer.step()
        del optimizer
    for at, part in parts:
        assert_same(parameter.detach()[at], part.detach(), f"{at}")
