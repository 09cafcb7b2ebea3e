"""Shortcuts around a convolution: its backward adds the shortcut's gradient to its own."""

import pytest
import torch
from common import opcheck
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import warpwright.functional as F
from warpwright import explain
from warpwright.swap.joins import skip_of
from warpwright.testing import assert_as_good_as_native, assert_same

ops = torch.ops.warpwright
CHANNELS_LAST = torch.channels_last
WINDOW = ([1, 2], [1, 0], [1, 1], 1)
HALVES = [torch.bfloat16, torch.float16]


# ---- the operator ----


def small(device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 5, 4, 2), (2, 3, 4, 5), (5, 3, 3, 3), (2, 3, 4, 5))  # dy, x, w, addend
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for s in shapes
    ]


def backward(dy, x, w, addend, mask=(True, True, True)):
    return ops.conv2d_backward(dy, x, w, *WINDOW, mask, addend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [None, CHANNELS_LAST], ids=["nchw", "nhwc"])
def test_addend(device, dtype, form):
    dy, x, w, addend = (t.detach() for t in small(device, dtype))
    if form is not None:
        x, addend = x.to(memory_format=form), addend.to(memory_format=form)
    plain = ops.conv2d_backward(dy, x, w, *WINDOW, [True, True, True])
    exact = ops.conv2d_backward(*(t.double() for t in (dy, x, w)), *WINDOW, [True, True, True])
    for other in (addend, addend.to(memory_format=CHANNELS_LAST), addend.expand_as(addend)):
        before = other.clone()
        dx, dw, db = backward(dy, x, w, other)
        assert_same([dw, db], list(plain[1:]))
        assert dx.stride() == plain[0].stride()
        assert_as_good_as_native(dx, plain[0] + other, exact[0] + other.double(), "dx")
        assert torch.equal(other, before)  # nobody else's gradient changes
    image = ops.conv2d_backward(dy[0], x[0], w, *WINDOW, [True, False, False], addend[0])[0]
    torch.testing.assert_close(image, backward(dy, x, w, addend)[0][0])


def test_derivatives_of_the_operator(device):
    inputs = small(device)
    assert gradcheck(backward, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(backward, inputs, fast_mode=True)


def test_opcheck(device):
    dy, x, w, addend = small(device, torch.float32)
    for mask in ([True, True, True], [True, False, False]):
        opcheck(ops.conv2d_backward.default, (dy, x, w, *WINDOW, mask, addend))


def test_batched(device):
    dy, x, w, addend = (torch.stack([t, 2 * t]).detach() for t in small(device))
    for dims in ((0, 0, 0, 0), (0, 0, None, 0), (None, 0, None, None), (0, None, 0, None)):
        args = [t if d == 0 else t[0] for t, d in zip((dy, x, w, addend), dims, strict=True)]
        found = torch.vmap(backward, in_dims=dims)(*args)
        for i in range(2):
            one = [t[i] if d == 0 else t for t, d in zip(args, dims, strict=True)]
            torch.testing.assert_close([f[i] for f in found], list(backward(*one)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[..., :-1], "addend: expected shape"),
        (lambda t: t.float(), "addend: expected Double, got Float"),
        (lambda t: t.to("meta"), "conv2d_backward: addend"),
    ],
)
def test_errors(device, change, message):
    dy, x, w, addend = small(device)
    with pytest.raises(RuntimeError, match=message):
        backward(dy, x, w, change(addend))
    with pytest.raises(RuntimeError, match="expected none without the gradient of the input"):
        backward(dy, x, w, addend, (False, True, True))


# ---- the node ----


def joined(x, w, layers=lambda y: y, shortcut=lambda x: x, expected=True):
    y = layers(F.conv2d(x, w, padding=1))
    skip = skip_of(x, y)
    assert (skip is not x) == expected
    return y, shortcut(skip)


def leaves(device, dtype=torch.float64, c=4):
    generator = torch.Generator().manual_seed(c)
    x = torch.randn(2, c, 5, 6, generator=generator, dtype=torch.float64)
    w = torch.randn(c, c, 3, 3, generator=generator, dtype=torch.float64)
    return [t.to(device, dtype).requires_grad_() for t in (x, w)]


def write_and_go_back(tensor, output):
    tensor.add_(1)
    output.sum().backward()


def norm(y):
    return F.batch_norm_relu(y, None, None, training=True)


def square(x):
    return x * x


@pytest.mark.parametrize("layers", [lambda y: y, norm], ids=["conv", "norm"])
@pytest.mark.parametrize("leaf", [True, False])
def test_gradients(device, layers, leaf):
    def run(join):
        x, w = leaves(device)
        source = x if leaf else x * 3
        y = layers(F.conv2d(source, w, padding=1))
        skip = skip_of(source, y) if join else source
        assert (skip is not source) == join
        assert torch.equal(skip, source)
        out = (y + square(skip)).sin()
        return torch.autograd.grad(out.sum(), (x, w))

    torch.testing.assert_close(run(True), run(False))


def test_nothing_else_adds(device):
    """One node hands the sum to x: no accumulation happens at x."""
    x, w = leaves(device)
    source = x * 1
    seen = []
    source.register_hook(lambda g: seen.append(g.clone()))
    y, skip = joined(source, w, norm)
    assert skip.grad_fn.name() == "WarpwrightConv2dBackward"
    (y * 2 + skip * 3).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], x.grad)


def test_one_of_the_gradients(device):
    """Either output may have none."""
    for pick in (0, 1):
        x, w = leaves(device)
        pair = joined(x, w)
        (dx,) = torch.autograd.grad(square(pair[pick]).sum(), x)
        x2, w2 = leaves(device)
        plain = (F.conv2d(x2, w2, padding=1), x2)
        (expected,) = torch.autograd.grad(square(plain[pick]).sum(), x2)
        torch.testing.assert_close(dx, expected)
    x, w = leaves(device)
    y, skip = joined(x, w)
    (dw,) = torch.autograd.grad((y + skip).sum(), w)  # x's gradient is not wanted
    torch.testing.assert_close(dw, torch.autograd.grad(F.conv2d(x, w, padding=1).sum(), w)[0])


def test_second_derivatives(device):
    def run(x, w):
        y, skip = joined(x, w, lambda y: y.sin())
        return y + square(skip)

    inputs = leaves(device, c=2)
    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


def test_who_is_left_alone(device):
    x, w = leaves(device)
    with torch.no_grad():
        joined(x, w, expected=False)
    joined(x.detach(), w, expected=False)
    y = F.conv2d(x, w, padding=1)
    assert skip_of(x * 1, y).grad_fn.name() == "MulBackward0"  # another tensor
    assert skip_of(x, x * 2) is x  # no convolution
    assert skip_of(x, None) is x
    assert skip_of(x, y) is not x
    assert skip_of(x, y) is x  # a node has one skip
    torch.vmap(lambda x: joined(x, w, expected=False)[0])(x[None])
    torch.func.grad(lambda x: sum(t.sum() for t in joined(x, w, expected=False)))(x)
    torch.func.functionalize(lambda x: joined(x, w, expected=False)[0])(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y, skip = joined(dual, w, expected=False)
        assert forward_ad.unpack_dual(y + skip).tangent is not None


def test_compile(device):
    def run(x, w):
        y = F.conv2d(x, w, padding=1)
        return (y + square(skip_of(x, y))).sin()

    x, w = leaves(device)
    expected = torch.autograd.grad(run(x, w).sum(), (x, w))
    backwards = []

    def note(module, _):
        backwards.extend(n for n in module.graph.nodes if n.target is ops.conv2d_backward.default)
        return module

    backend = aot_autograd(fw_compiler=lambda module, _: module, bw_compiler=note)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w).sum(), (x, w)), expected)
    (backward,) = backwards
    assert len(backward.args) == 9  # the last one is the shortcut's gradient


def returns_both(x, w):
    y = F.conv2d(x, w, padding=1)
    return y, skip_of(x, y)


def returns_all(x, w):
    source = x * 1
    return *returns_both(source, w), source


def breaks_the_graph(x, w):
    y, skip, _ = returns_all(x, w)
    torch._dynamo.graph_break()
    return ((y + square(skip)).sin(),)


def adds_in_place(x, w):
    y, skip, _ = returns_all(x, w)
    return (y.add_(skip).relu_(),)


@pytest.mark.parametrize(
    "function",
    [returns_both, returns_all, breaks_the_graph, adds_in_place],
    ids=lambda f: f.__name__,
)
def test_compiled_where_the_shortcut_leaves_the_graph(device, function):
    def gradients(run):
        x, w = leaves(device)
        loss = sum((i + 1) * square(t).sum() for i, t in enumerate(run(x, w)))
        return torch.autograd.grad(loss, (x, w))

    compiled = torch.compile(function, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(function))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_none(strict):
    class Block(torch.nn.Module):
        def forward(self, x, w):
            y = F.conv2d(x, w, padding=1)
            return y + square(skip_of(x, y))

    program = torch.export.export(Block(), tuple(leaves("cpu")), strict=strict)
    assert "conv2d" in program.graph_module.code
    assert "conv2d_join_skip" not in program.graph_module.code


def test_writes_are_seen(device):
    """The shortcut shares its version with x: no gradient is wrong silently."""
    for target in ("x", "shortcut"):
        x, w = leaves(device)
        source = x * 1
        y, skip = joined(source, w)
        z = square(skip)  # saves it
        with pytest.raises(RuntimeError, match="modified"):
            write_and_go_back(source if target == "x" else skip, y + z)
    with pytest.raises(RuntimeError, match="view"):
        joined(x * 1, w)[1].add_(1)


def test_anomaly_and_retained_graph(device):
    x, w = leaves(device)
    y, skip = joined(x, w)
    out = (y + skip).sum()
    first = torch.autograd.grad(out, (x, w), retain_graph=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        second = torch.autograd.grad(out, (x, w))
    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, (x, w))


def test_gradients_in_batches(device):
    """is_grads_batched runs the node under vmap."""
    x, w = leaves(device)
    y, skip = joined(x, w)
    out = y + square(skip)
    rows = torch.stack([torch.ones_like(out), torch.randn_like(out)])
    found = torch.autograd.grad(out, (x, w), rows, is_grads_batched=True, retain_graph=True)
    for i, row in enumerate(rows):
        one = torch.autograd.grad(out, (x, w), row, retain_graph=True)
        torch.testing.assert_close([f[i] for f in found], list(one))


# ---- the kernels ----

# n, c, h, w, k, window, stride, padding, groups
LAYERS = {
    "1x1": (2, 256, 14, 15, 64, 1, 1, 0, 1),
    "1x1_narrow": (3, 64, 13, 9, 128, 1, 1, 0, 1),
    "1x1_tails": (3, 136, 11, 13, 72, 1, 1, 0, 1),
    "1x1_few": (1, 8, 5, 7, 8, 1, 1, 0, 1),
    "1x1_many_tiles": (40, 256, 28, 28, 128, 1, 1, 0, 1),
    "1x1_stride": (4, 256, 33, 35, 512, 1, 2, 0, 1),
    "3x3_64": (2, 64, 17, 23, 64, 3, 1, 1, 1),
    "3x3_64_many_tiles": (48, 64, 56, 56, 64, 3, 1, 1, 1),
    "3x3_128": (2, 128, 15, 17, 192, 3, 1, 1, 1),
    "3x3_tails": (3, 72, 11, 13, 136, 3, 1, 1, 1),
    "3x3_40": (3, 40, 11, 13, 64, 3, 1, 1, 1),
    "3x3_stride": (3, 128, 14, 15, 128, 3, 2, 1, 1),
    "3x3_stride_64": (3, 64, 27, 15, 128, 3, 2, 1, 1),
    "5x3_stride": (2, 64, 18, 17, 64, (5, 3), (2, 1), (2, 1), 1),
    "groups": (2, 256, 9, 10, 256, 3, 1, 1, 2),
}


def layer(case, device, dtype):
    n, c, h, w, k, window, stride, padding, groups = LAYERS[case]
    r, s = (window, window) if isinstance(window, int) else window
    generator = torch.Generator().manual_seed(n + c)

    def t(*sizes):
        value = torch.randn(sizes, generator=generator).to(device, dtype)
        return value.to(memory_format=CHANNELS_LAST)

    x, weight = t(n, c, h, w), t(k, c // groups, r, s)
    geometry = [[v, v] if isinstance(v, int) else [*v] for v in (stride, padding, 1)]
    y = torch.nn.functional.conv2d(x, weight, None, *geometry, groups)
    return t(*y.shape), x, weight, t(n, c, h, w), (*geometry, groups)


@pytest.mark.parametrize("case", LAYERS)
def test_choice(case):
    n, c, h, w, k, window, *rest, groups = LAYERS[case]
    r, s = (window, window) if isinstance(window, int) else window
    x = torch.empty(n, c, h, w, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(k, c // groups, r, s, dtype=torch.bfloat16, device="meta")
    x, weight = (t.to(memory_format=CHANNELS_LAST) for t in (x, weight))
    text = explain("conv2d", x, weight, None, *rest, 1, groups, device="h200")
    assert ("adds the shortcut's gradient" in text) == ("portable" not in text.splitlines()[2])


def test_who_has_no_kernel():
    x = torch.empty(2, 64, 16, 16, dtype=torch.bfloat16, device="meta")
    w = torch.empty(64, 64, 3, 3, dtype=torch.bfloat16, device="meta")
    last = x.to(memory_format=CHANNELS_LAST)
    assert "shortcut" in explain("conv2d", last, w, None, 1, 1, device="h200")
    assert "shortcut" not in explain("conv2d", x, w, None, 1, 1, device="h200")
    assert "shortcut" not in explain("conv2d", last.float(), w.float(), None, 1, 1, device="h200")
    assert "shortcut" not in explain("conv2d", last, w, None, 3, 1, device="h200")
    depthwise = torch.empty(64, 1, 3, 3, dtype=torch.bfloat16, device="meta")
    text = explain("conv2d", last, depthwise, None, 1, 1, 1, 64, device="h200")
    assert "shortcut" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_values(case, dtype):
    dy, x, w, addend, geometry = layer(case, "cuda", dtype)
    mask = [True, False, False]
    before = addend.clone()
    dx = ops.conv2d_backward(dy, x, w, *geometry, mask, addend)[0]
    assert dx.is_contiguous(memory_format=CHANNELS_LAST)
    assert torch.equal(addend, before)

    def native(dy, x, w, addend):
        *window, groups = geometry
        return addend + torch.ops.aten.convolution_backward(
            dy, x, w, None, *window, False, [0, 0], groups, mask
        )[0]  # fmt: skip

    exact = native(*(t.double() for t in (dy, x, w, addend)))
    assert_as_good_as_native(dx, native(dy, x, w, addend), exact, case)
    again = ops.conv2d_backward(dy, x, w, *geometry, mask, addend)[0]
    assert torch.equal(dx, again)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_integers_are_exact(case, dtype):
    dy, x, w, addend, geometry = layer(case, "cuda", dtype)
    dy, w, addend = (t.clamp(-2, 2).round() for t in (dy, w, addend))
    dy = dy * (torch.rand_like(dy, dtype=torch.float32) < 0.05)  # small sums
    mask = [True, False, False]
    dx = ops.conv2d_backward(dy.to(dtype), x, w, *geometry, mask, addend)[0]
    exact = ops.conv2d_backward(
        *(t.double() for t in (dy, x, w)), *geometry, mask, addend.double()
    )[0]
    assert torch.equal(dx.double(), exact.to(dtype).double())


@pytest.mark.gpu
def test_special_values_and_other_layouts():
    dy, x, w, addend, geometry = layer("1x1", "cuda", torch.bfloat16)
    addend[0, 3, 2, 1], addend[1, 200, 5, 3] = float("inf"), float("nan")
    mask = [True, False, False]
    plain = ops.conv2d_backward(dy, x, w, *geometry, mask)[0]
    dx = ops.conv2d_backward(dy, x, w, *geometry, mask, addend)[0]
    assert torch.equal(dx.isnan(), addend.isnan())
    assert torch.equal(dx.isinf(), addend.isinf())
    # Rounded once: half a unit in the last place of the sum, and what float32 sums lose.
    doubles = (t.double() for t in (dy, x, w))
    exact = ops.conv2d_backward(*doubles, *geometry, mask, addend.double())[0]
    torch.testing.assert_close(dx.double(), exact, rtol=2**-8, atol=2**-12, equal_nan=True)
    for other in (addend.contiguous(), addend[:, :1].expand_as(addend)):
        dx = ops.conv2d_backward(dy, x, w, *geometry, mask, other)[0]
        assert torch.equal(dx.nan_to_num(7), (plain + other).nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["1x1_many_tiles", "3x3_64_many_tiles", "3x3_stride"])
def test_same_bits_every_time(case):
    dy, x, w, addend, geometry = layer(case, "cuda", torch.bfloat16)
    mask = [True, False, False]
    first = ops.conv2d_backward(dy, x, w, *geometry, mask, addend)[0]
    for _ in range(50):
        assert torch.equal(ops.conv2d_backward(dy, x, w, *geometry, mask, addend)[0], first)
