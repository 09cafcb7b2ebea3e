"""layer_scale_add against native's formula: a product per channel, one per sample, an addition."""

import pytest
import torch
from common import assert_no_leak, gradcheck, layouts, opcheck, subsets

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
HALF = (torch.bfloat16, torch.float16)
# Shapes of input and scale: images, rows, channels of odd number, of part of a vector, and many.
SHAPES = [
    ((2, 8, 5, 3), (8, 1, 1)),
    ((3, 7, 4, 4), (7, 1, 1)),
    ((2, 12, 3, 3), (1, 12, 1, 1)),
    ((1, 1, 1, 1), (1, 1, 1)),
    ((2, 5, 16), (16,)),
    ((2, 3, 4, 5), (1,)),
    ((40, 96), (96,)),
    ((3, 2050), (1, 2050)),
    ((2, 1, 4, 3, 2), (1, 4, 1, 1)),
    ((4, 6), (4, 1)),
    ((9,), (9,)),
    ((), ()),
]
each_shape = pytest.mark.parametrize("shapes", SHAPES, ids=str)
with_samples = pytest.mark.parametrize("samples", [False, True], ids=["", "samples"])


def native(x, residual, scale, sample_scale=None):
    scaled = scale * x
    return residual + (scaled if sample_scale is None else scaled * sample_scale)


def factors(x, dtype):
    """One per sample of x, as stochastic depth draws them."""
    if x.dim() == 0:
        return torch.full((), 1.25, device=x.device, dtype=dtype)
    kept = torch.arange(x.shape[0], device=x.device) % 3 != 1
    return (kept / 0.8).to(dtype).view(-1, *(1,) * (x.dim() - 1))


def arguments(shapes, device, dtype, wide=None, samples=False):
    """Leaves: the input of ``dtype``, residual and scale of ``wide``, and factors."""
    wide = wide or dtype
    x = torch.randn(shapes[0], device=device).to(dtype)
    residual = torch.randn(shapes[0], device=device).to(wide)
    scale = torch.randn(shapes[1], device=device).to(wide)
    leaves = [t.requires_grad_() for t in (x, residual, scale)]
    return [*leaves, factors(x, wide)] if samples else leaves


def assert_close(found, expected, what=None):
    """Up to the roundings of single ops, which the kernels do not make."""
    largest = float(expected.detach().abs().max())
    atol = 4 * torch.finfo(expected.dtype).eps * max(largest, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=what)


def in_layouts(args):
    """Input and residual in each layout."""
    x, residual, *rest = args
    pairs = zip(layouts(x.detach()), layouts(residual.detach()), strict=True)
    for (name, a), (_, b) in pairs:
        yield name, [a.requires_grad_(), b.requires_grad_(), *rest]


# ---- values and derivatives ----


@with_samples
@each_shape
def test_values(device, dtype, shapes, samples):
    for name, args in in_layouts(arguments(shapes, device, dtype, samples=samples)):
        found, expected = F.layer_scale_add(*args), native(*args)
        if device == "cpu" or name in ("contiguous", "channels_last"):
            assert found.stride() == expected.stride(), name
        compare_with_native(F.layer_scale_add, native, tuple(args))


@with_samples
@pytest.mark.parametrize("narrow", HALF, ids=str)
@each_shape
def test_float32_next_to_16_bits(device, narrow, shapes, samples):
    """As under autocast: only the block's output is narrow."""
    for _, args in in_layouts(arguments(shapes, device, narrow, torch.float32, samples)):
        compare_with_native(F.layer_scale_add, native, tuple(args))


TYPES = (torch.float32, torch.float64, *HALF)


@pytest.mark.parametrize("of_input", TYPES, ids=str)
@pytest.mark.parametrize("of_residual", TYPES, ids=str)
@pytest.mark.parametrize("of_factors", TYPES, ids=str)
def test_mixed_types(device, of_input, of_residual, of_factors):
    """Native promotes; each gradient has the type of its tensor."""
    for (shape, of_scale), layout in (
        (((2, 8, 3, 3), (8, 1, 1)), torch.channels_last),
        (((2, 6, 3, 3), (6, 1, 1)), torch.contiguous_format),
    ):
        x, residual = (
            torch.randn(shape, device=device).to(dtype=dtype, memory_format=layout)
            for dtype in (of_input, of_residual)
        )
        scale = torch.randn(of_scale, device=device).to(of_factors)
        leaves = [t.requires_grad_() for t in (x, residual, scale)]
        compare_with_native(F.layer_scale_add, native, tuple(leaves))
        for dtype in TYPES:
            compare_with_native(F.layer_scale_add, native, (*leaves, factors(x, dtype)))


def test_layouts_of_the_residual(device, dtype):
    """Input, residual and gradient in memory orders of their own."""
    x, residual, scale = (t.detach() for t in arguments(SHAPES[0], device, dtype))
    expected = F.layer_scale_add(x, residual, scale)
    leaves = [t.clone().requires_grad_() for t in (x, residual, scale)]
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(F.layer_scale_add(*leaves), leaves, dy)
    for first, a in layouts(x):
        for second, b in layouts(residual):
            assert_close(F.layer_scale_add(a, b, scale), expected, f"{first}, {second}")
        for third, gradient in layouts(dy):
            leaves = [t.clone().requires_grad_() for t in (a, residual, scale)]
            found = torch.autograd.grad(F.layer_scale_add(*leaves), leaves, gradient)
            for mine, theirs in zip(found, gradients, strict=True):
                assert_close(mine, theirs, f"{first}, {third}")


def test_views(device, dtype):
    """Expanded tensors, slices with gaps and strided factors."""
    x = torch.randn(6, 10, 32, device=device).to(dtype)
    scale = torch.randn(32, device=device).to(dtype)
    wide = torch.stack((scale, scale), 1)[:, 0]
    for a in (x[::2, 1:5, 3:19], x[:1].expand(3, 10, 32)[:, :4, :16], x[:3, :4].flip(2)[..., :16]):
        for b in (a, a.clone(), x[:1, :1, :1].expand(3, 4, 16)):
            for s in (scale[:16], wide[:16], scale[::2], scale[:1].expand(16)):
                leaves = [t.detach().requires_grad_() for t in (a, b, s)]
                compare_with_native(F.layer_scale_add, native, tuple(leaves))
                dense = F.layer_scale_add(a.contiguous(), b.contiguous(), s.contiguous())
                assert_close(F.layer_scale_add(a, b, s), dense)


def test_samples_that_are_not_outermost(device, dtype):
    """Samples next to each other in memory, and those of a batch that is no dimension of its own."""
    x, residual, scale, samples = arguments(((6, 5, 16), (16,)), device, dtype, samples=True)
    a, b = (t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in (x, residual))
    compare_with_native(F.layer_scale_add, native, (a.requires_grad_(), b, scale, samples))
    one = arguments(((1, 6, 3, 3), (6, 1, 1)), device, dtype, samples=True)
    compare_with_native(F.layer_scale_add, native, tuple(one))
    own = arguments(((6, 5), (6, 1)), device, dtype, samples=True)  # channels that are the samples
    compare_with_native(F.layer_scale_add, native, tuple(own))


def test_integer_values(device, dtype):
    """Exact products and sums: native's bits."""
    for shapes, layout in ((SHAPES[0], torch.channels_last), (SHAPES[6], torch.contiguous_format)):
        x, residual, scale = (
            torch.randint(-3, 4, sizes, device=device).to(dtype) for sizes in (shapes[0], *shapes)
        )
        x, residual = (t.contiguous(memory_format=layout) for t in (x, residual))
        samples = torch.arange(shapes[0][0], device=device).to(dtype) % 2 * 2
        samples = samples.view(-1, *(1,) * (x.dim() - 1))
        leaves = [t.requires_grad_() for t in (x, residual, scale)]
        for more in ((), (samples,)):
            results = []
            for function in (F.layer_scale_add, native):
                y = function(*leaves, *more)
                dy = torch.arange(y.numel(), device=device).view(y.shape) % 5 - 2
                results.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
            assert_same(*results)


SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0]


@pytest.mark.parametrize("channels", [6, 16])
@pytest.mark.parametrize("place", range(4), ids=["input", "residual", "scale", "samples"])
def test_special_values(device, dtype, channels, place):
    """NaN and infinities stay where native has them, in the gradients too."""
    shapes = ((6, 3, channels), (channels,))
    args = [t.detach() for t in arguments(shapes, device, dtype, samples=True)]
    special = torch.tensor(SPECIAL, device=device).to(dtype)
    where = args[place].transpose(0, -1)[:6, 0] if place < 2 else args[place].view(-1)[:6]
    where.copy_(special[:, None] if where.dim() == 2 else special)
    args = [t.requires_grad_(i < 3) for i, t in enumerate(args)]
    compare_with_native(F.layer_scale_add, native, tuple(args))


def test_a_dropped_sample(device, dtype):
    """A factor of 0 leaves the residual's bits and no gradient of the input."""
    x, residual, scale, _ = arguments(SHAPES[0], device, dtype, samples=True)
    zeros = torch.zeros(2, 1, 1, 1, device=device, dtype=dtype)
    y = F.layer_scale_add(x, residual, scale, zeros)
    assert torch.equal(y, residual)
    found = torch.autograd.grad(y.sum(), (x, residual, scale))
    assert not found[0].any()
    assert (found[1] == 1).all()
    assert not found[2].any()


@with_samples
@pytest.mark.parametrize(
    "shapes",
    [((0, 4, 3, 3), (4, 1, 1)), ((2, 0, 3, 3), (0, 1, 1)), ((2, 4, 0, 3), (4, 1, 1)), ((0,), (0,))],
    ids=str,
)
def test_empty(device, shapes, samples):
    args = arguments(shapes, device, torch.float32, samples=samples)
    y = F.layer_scale_add(*args)
    assert y.shape == shapes[0]
    found = torch.autograd.grad(y.sum(), args[:3])
    assert [g.shape for g in found] == [t.shape for t in args[:3]]
    assert not found[2].any()


@pytest.mark.parametrize("channels", [4097, 8192])
def test_many_channels(device, dtype, channels):
    compare_with_native(
        F.layer_scale_add, native, tuple(arguments(((5, channels), (channels,)), device, dtype))
    )


def test_many_rows(device):
    """The channels' sums in several parts, of both types."""
    for dtype, wide in ((torch.float32, None), (torch.bfloat16, torch.float32)):
        args = arguments(((4, 24, 56, 56), (24, 1, 1)), device, dtype, wide, samples=True)
        last = [t.detach().to(memory_format=torch.channels_last) for t in args[:2]]
        leaves = [t.requires_grad_() for t in last]
        compare_with_native(F.layer_scale_add, native, (*leaves, *args[2:]))


# ---- derivatives ----


def test_subsets_of_gradients(device, dtype):
    x, residual, scale, samples = arguments(SHAPES[0], device, dtype, samples=True)
    full = [x, residual, scale]
    everything = torch.autograd.grad(F.layer_scale_add(*full, samples).sum(), full)
    for wanted in subsets(3):
        leaves = [t.detach().requires_grad_(w) for t, w in zip(full, wanted, strict=True)]
        asked = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(F.layer_scale_add(*leaves, samples).sum(), asked)
        assert_same(list(found), [g for g, w in zip(everything, wanted, strict=True) if w])


def test_a_mask_of_the_raw_backward(device):
    x, residual, scale, samples = arguments(SHAPES[0], device, torch.float32, samples=True)
    args = (residual.detach(), x.detach(), scale.detach(), samples)
    both = ops.layer_scale_add_backward(*args, [True, True])
    for mask in ([True, False], [False, True], [False, False]):
        for found, wanted, expected in zip(
            ops.layer_scale_add_backward(*args, mask), mask, both, strict=True
        ):
            if wanted:
                assert_same(found, expected)
            else:
                assert found is None


def test_factors_that_require_a_gradient(device, dtype):
    *leaves, samples = arguments(SHAPES[0], device, dtype, samples=True)
    compare_with_native(F.layer_scale_add, native, (*leaves, samples.requires_grad_()))


@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 2, 2), (3, 1, 1)), ((2, 3, 4), (4,)), ((3, 2), (3, 1)), ((2, 3), ())],
    ids=str,
)
def test_gradients(device, shapes):
    *leaves, samples = arguments(shapes, device, torch.float64, samples=True)
    gradcheck(F.layer_scale_add, leaves)
    gradcheck(F.layer_scale_add, [*leaves, samples])
    gradcheck(F.layer_scale_add, [*leaves, samples.requires_grad_()])
    for wanted in subsets(3):
        gradcheck(
            F.layer_scale_add,
            [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)],
        )


def test_gradients_in_channels_last(device):
    x, residual, scale, samples = arguments(
        ((2, 3, 2, 2), (3, 1, 1)), device, torch.float64, samples=True
    )
    last = [t.detach().to(memory_format=torch.channels_last) for t in (x, residual)]
    gradcheck(F.layer_scale_add, [*(t.requires_grad_() for t in last), scale, samples])


@pytest.mark.parametrize("wide", [None, torch.float32], ids=["one type", "float32"])
def test_second_gradients(device, dtype, wide):
    """In 16 bits too: gradcheck has float64 alone."""
    if dtype == torch.float64:
        wide = None

    def gradients_of(function):
        def run(x, residual, scale, samples, dy):
            leaves = (x, residual, scale)
            y = function(x, residual, scale, samples)
            found = torch.autograd.grad(y, leaves, dy, create_graph=True)
            return torch.cat([g.flatten().to(y.dtype) for g in found])

        return run

    *leaves, samples = arguments(SHAPES[0], device, dtype, wide, samples=True)
    dy = torch.randn_like(leaves[1]).requires_grad_()
    both = map(gradients_of, (F.layer_scale_add, native))
    compare_with_native(*both, (*leaves, samples, dy))


def test_func_transforms(device):
    args = [
        t.detach()
        for t in arguments(((2, 3, 2, 2), (3, 1, 1)), device, torch.float64, samples=True)
    ]
    tangents = [torch.randn_like(a) for a in args]
    both = (F.layer_scale_add, native)
    found, expected = (torch.func.jvp(f, tuple(args), tuple(tangents)) for f in both)
    torch.testing.assert_close(found, expected)
    scalars = [lambda *a, f=f: f(*a).sin().sum() for f in both]
    for argnums in range(4):
        for transform in (torch.func.grad, torch.func.hessian):
            mine, theirs = (transform(f, argnums)(*args) for f in scalars)
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("batched", subsets(4))
def test_vmap(device, batched):
    shapes = ((2, 3, 2, 2), (3, 1, 1))
    draws = [arguments(shapes, device, torch.float64, samples=True) for _ in range(3)]
    stacked = [
        torch.stack([d[i].detach() for d in draws]) if b else draws[0][i].detach()
        for i, b in enumerate(batched)
    ]
    dims = tuple(0 if b else None for b in batched)
    for transform in (
        lambda f: f,
        lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), (0, 1)),
        lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), 2),
        lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), 3),
    ):
        found, expected = (
            torch.vmap(transform(f), dims)(*stacked) for f in (F.layer_scale_add, native)
        )
        torch.testing.assert_close(found, expected)


# ---- the rest of the contract ----


@pytest.mark.parametrize("lower", HALF, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_nothing(device, lower, wide):
    """As native, whose product and sum promote."""
    args = arguments(SHAPES[0], device, torch.bfloat16, wide, samples=True)
    with torch.autocast(device, dtype=lower):
        compare_with_native(F.layer_scale_add, native, tuple(args))
        assert F.layer_scale_add(*args).dtype == wide


def test_repeats_are_equal(device):
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, None)):
        args = arguments(((8, 96, 28, 28), (96, 1, 1)), device, dtype, wide, samples=True)
        x, residual = (
            t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in args[:2]
        )
        runs = []
        for _ in range(3):
            y = F.layer_scale_add(x, residual, *args[2:])
            runs.append((y, *torch.autograd.grad(y.sin().sum(), (x, residual, args[2]))))
        assert_same(runs[1], runs[0])
        assert_same(runs[2], runs[0])


def test_opcheck(device):
    for shapes, wide in (
        (((2, 8, 3, 3), (8, 1, 1)), torch.float32),
        (((2, 3, 7), (7,)), torch.bfloat16),
    ):
        x, residual, scale, samples = arguments(shapes, device, torch.bfloat16, wide, samples=True)
        pairs = [(x, residual)]
        if x.dim() == 4:
            last = torch.channels_last
            pairs.append([t.detach().to(memory_format=last).requires_grad_() for t in pairs[0]])
        for a, b in pairs:
            opcheck(ops.layer_scale_add.default, (a, b, scale))
            opcheck(ops.layer_scale_add.default, (a, b, scale, samples))
            for mask in subsets(2):
                call = (torch.randn_like(b), a, scale, samples, list(mask))
                opcheck(ops.layer_scale_add_backward.default, call)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x, residual, scale, samples):
        return F.layer_scale_add(x.sin(), residual, scale, samples)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (3, 5):
        args = arguments(((n, 4, 3, 3), (4, 1, 1)), device, torch.float32, samples=True)
        expected, found = step(*args), compiled(*args)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.cos().sum(), args[:3]) for y in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_memory_is_freed(device):
    assert_no_leak(F.layer_scale_add, *arguments(SHAPES[0], device, torch.float32, samples=True))


def test_only_the_arguments_are_kept(device):
    x, residual, scale, samples = arguments(SHAPES[0], device, torch.float32, samples=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.layer_scale_add(x, residual, scale, samples)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (x, scale, samples)]


def test_meta_tensors():
    args = [t.to("meta") for t in arguments(SHAPES[0], "cpu", HALF[0], torch.float32, samples=True)]
    found, expected = F.layer_scale_add(*args), native(*args)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.stride() == expected.stride()


# ---- explain ----


def test_explain():
    def image(*sizes, dtype=torch.bfloat16, layout=torch.channels_last):
        return torch.empty(sizes, dtype=dtype).to(memory_format=layout)

    def text(*args):
        return warpwright.explain("layer_scale_add", *args, device="h200")

    shape, scale = (8, 96, 56, 56), torch.empty(96, 1, 1)
    x, residual = image(*shape), image(*shape, dtype=torch.float32)
    lines = text(x, residual, scale).splitlines()
    assert "16-byte accesses" in lines[1]
    assert "column sums, 16-byte accesses" in lines[2]
    samples = torch.empty(8, 1, 1, 1)
    assert text(x, residual, scale, samples).splitlines()[1:] == lines[1:]
    assert text(x, x, scale).splitlines()[1:] == lines[1:]  # a residual of 16 bits
    odd = image(2, 7, 5, 5), image(2, 7, 5, 5), torch.empty(7, 1, 1).bfloat16()
    assert "element accesses" in text(*odd)
    planes = [image(*shape, layout=torch.contiguous_format) for _ in range(2)]
    for args, reason in (
        ((*planes, scale.bfloat16()), "channels are not innermost"),
        ((x, planes[0].float(), scale), "input and residual differ in memory order"),
        ((x, x.half(), scale), "the residual is not of the result's type"),
        ((x, residual.double(), scale), "types other than one"),
        ((x, x, torch.empty(1).bfloat16()), "scale has one value"),
        ((x[..., :5], residual[..., :5], scale), "the input has gaps in memory"),
        (
            (torch.empty(4, 8).t(), torch.empty(4, 8).t(), torch.empty(8, 1), torch.empty(8, 1)),
            "samples are not outermost",
        ),
    ):
        assert f"one ATen operator after the other: {reason}" in text(*args), reason
    assert "nothing to do" in text(x[:0], residual[:0], scale)
    assert "ATen's operators" in warpwright.explain("layer_scale_add", x, residual, scale)
