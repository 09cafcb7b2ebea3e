"""squeeze_excitation gives what native's chain gives: pooling, two 1x1 convolutions, product."""

import pytest
import torch
from common import assert_no_leak, gradcheck, layouts, opcheck, subsets

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, assert_same, compare_with_native

native = torch.nn.functional
ops = torch.ops.warpwright
ACTIVATIONS = {"relu": native.relu, "silu": native.silu}
SCALES = {"sigmoid": torch.sigmoid, "hardsigmoid": lambda z: (z + 3).clamp(0, 6) / 6}
FORMS = [(a, s) for a in ACTIVATIONS for s in SCALES]
each_form = pytest.mark.parametrize("form", FORMS, ids="-".join)
# N, C, S, H, W: one image, channels of odd number, whole vectors, more channels than threads.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 5, 3, 7, 6),
    (3, 32, 8, 14, 14),
    (2, 64, 20, 9, 9),
    (5, 1152, 48, 7, 7),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def chain(x, w1, b1, w2, b2, activation="relu", scale_activation="sigmoid"):
    """Hardsigmoid by its formula: native's has 1/6 in float32 on a CPU, and no second derivative."""
    kernels = [w if w.dim() == 4 else w[:, :, None, None] for w in (w1, w2)]
    scale = native.adaptive_avg_pool2d(x, 1)
    scale = ACTIVATIONS[activation](native.conv2d(scale, kernels[0], b1))
    return SCALES[scale_activation](native.conv2d(scale, kernels[1], b2)) * x


def layers(c, s, device, dtype, bias=True, dims=4):
    tail = (1, 1) if dims == 4 else ()
    w1 = torch.randn(s, c, *tail, device=device) / c**0.5
    w2 = torch.randn(c, s, *tail, device=device) * 2 / s**0.5
    biases = (
        (torch.randn(s, device=device), torch.randn(c, device=device)) if bias else (None, None)
    )
    found = (w1, biases[0], w2, biases[1])
    return [t if t is None else t.to(dtype).requires_grad_() for t in found]


def arguments(shape, device, dtype, **options):
    n, c, s, h, w = shape
    x = (torch.randn(n, c, h, w, device=device) + 0.5).to(dtype)
    return [x.requires_grad_(), *layers(c, s, device, dtype, **options)]


@pytest.mark.parametrize("form", [("relu", "hardsigmoid"), ("silu", "sigmoid")], ids="-".join)
@each_shape
def test_values(device, dtype, shape, form):
    """Convolutions with biases; matrices without."""
    bias = form[0] == "silu"
    x, *weights = arguments(shape, device, dtype, bias=bias, dims=4 if bias else 2)
    for _, input in layouts(x.detach()):
        compare_with_native(
            lambda *a: F.squeeze_excitation(*a, *form),
            lambda *a: chain(*a, *form),
            (input.requires_grad_(), *weights),
        )


def test_layouts_agree(device, dtype):
    """The same numbers in any layout; and each layout of grad_output."""
    x, *weights = (t.detach() for t in arguments((3, 16, 4, 6, 5), device, dtype))
    expected = F.squeeze_excitation(x, *weights)
    for name, input in layouts(x):
        found = F.squeeze_excitation(input, *weights)
        torch.testing.assert_close(found, expected, msg=name)
        if name == "transposed":
            assert found.stride() == input.stride()
    leaf = x.clone().requires_grad_()
    dy = torch.randn_like(x)
    (reference,) = torch.autograd.grad(F.squeeze_excitation(leaf, *weights), leaf, dy)
    for name, gradient in layouts(dy):
        (found,) = torch.autograd.grad(F.squeeze_excitation(leaf, *weights), leaf, gradient)
        torch.testing.assert_close(found, reference, msg=name)


def test_unbatched(device):
    x, *weights = arguments((1, 6, 2, 5, 4), device, torch.float32)
    assert_same(F.squeeze_excitation(x[0], *weights), F.squeeze_excitation(x, *weights)[0])


def test_strided_weights(device):
    """Weights that are views, and in channels_last."""
    x, w1, b1, w2, b2 = arguments((2, 8, 4, 5, 5), device, torch.float32)
    expected = F.squeeze_excitation(x, w1, b1, w2, b2)
    wide = torch.zeros(8, 8, 1, 1, device=device)
    wide[::2] = w1.detach()
    views = (wide[::2].requires_grad_(), b1, w2.detach().t_() if w2.dim() == 2 else w2, b2)
    assert_same(F.squeeze_excitation(x, *views), expected)
    last = [w.detach().to(memory_format=torch.channels_last).requires_grad_() for w in (w1, w2)]
    output = F.squeeze_excitation(x, last[0], b1, last[1], b2)
    assert_same(output, expected)
    for weight, gradient in zip(last, torch.autograd.grad(output.sum(), last), strict=True):
        assert gradient.stride() == weight.stride()


@each_form
def test_integer_values(device, dtype, form):
    """Integer means and layers are exact; the output is the chain's, in its bits."""
    x = torch.randint(-2, 3, (4, 8, 4, 4), device=device).to(dtype)
    x[:, :, 0, 0] -= x.sum((2, 3)) - 16 * torch.randint(-2, 3, (4, 8), device=device).to(dtype)
    w1 = torch.randint(-1, 2, (2, 8), device=device).to(dtype)
    w2 = torch.randint(-1, 2, (8, 2), device=device).to(dtype)
    if form != ("relu", "hardsigmoid"):
        return compare_with_native(
            lambda *a: F.squeeze_excitation(a[0], a[1], None, a[2], None, *form),
            lambda *a: chain(a[0], a[1], None, a[2], None, *form),
            (x, w1, w2),
        )
    w2 *= 3  # arguments that are multiples of 3: factors of 0, 1/2 and 1
    assert_same(
        F.squeeze_excitation(x, w1, None, w2, None, *form), chain(x, w1, None, w2, None, *form)
    )


@each_form
def test_special_values(device, dtype, form):
    """NaN and infinities stay in their image; arguments at and past the kinks."""
    x, *weights = (t.detach() for t in arguments((4, 3, 2, 3, 3), device, dtype))
    x[1, 0, 0, 0], x[2, 1, 1, 1] = float("nan"), float("inf")
    found, expected = F.squeeze_excitation(x, *weights, *form), chain(x, *weights, *form)
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found[3], F.squeeze_excitation(x[3:], *weights, *form)[0])
    one = torch.ones(1, 1, device=device, dtype=dtype)
    for value in (-4.0, -3.0, -2.0, 0.0, 3.0, 5.0, 90.0, -90.0):
        bias = torch.tensor([value], device=device).to(dtype).requires_grad_()
        plane = torch.full((1, 1, 2, 2), 0.5, device=device).to(dtype)
        args = (plane, one, -one[0], one, bias)
        outputs = [f(*args, *form) for f in (F.squeeze_excitation, chain)]
        assert_as_good_as_native(*outputs, chain(*(t.double() for t in args), *form))
    for end in (-3.0, 3.0):  # native's hardsigmoid has no gradient at its ends
        bias = torch.tensor([end], device=device).to(dtype).requires_grad_()
        output = F.squeeze_excitation(plane, one, -one[0], one, bias, "relu", "hardsigmoid")
        (gradient,) = torch.autograd.grad(output.sum(), bias)
        assert not gradient.any()


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (2, 4, 3, 0)])
def test_empty(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    weights = layers(4, 2, device, torch.float32)
    for function in (F.squeeze_excitation, chain):
        output = function(x, *weights)
        assert output.shape == x.shape
        found = torch.autograd.grad(output.sum(), (x, *weights))
        assert [g.shape for g in found] == [t.shape for t in (x, *weights)]
        if shape[0] == 0:
            assert all(not g.any() for g in found)


@each_form
def test_gradients(device, form):
    wide = lambda *a: F.squeeze_excitation(*a, *form)  # noqa: E731
    gradcheck(wide, arguments((2, 3, 2, 2, 3), device, torch.float64))
    x, w1, _, w2, _ = arguments((2, 3, 2, 2, 2), device, torch.float64)
    gradcheck(lambda x, w1, w2: wide(x, w1, None, w2, None), (x, w1, w2))


def test_subsets_of_gradients(device, dtype):
    full = arguments((3, 8, 4, 5, 5), device, dtype)
    everything = torch.autograd.grad(F.squeeze_excitation(*full).sum(), full)
    for wanted in subsets(5):
        leaves = [t.detach().requires_grad_(w) for t, w in zip(full, wanted, strict=True)]
        asked = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(F.squeeze_excitation(*leaves).sum(), asked)
        expected = [g for g, w in zip(everything, wanted, strict=True) if w]
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


@each_form
def test_second_gradients(device, dtype, form):
    """In 16 bits too: gradcheck has float64 alone."""

    def gradients_of(function):
        def run(x, w1, w2, dy):
            output = function(x, w1, None, w2, None, *form)
            found = torch.autograd.grad(output, (x, w1, w2), dy, create_graph=True)
            return torch.cat([g.flatten() for g in found])

        return run

    x, w1, _, w2, _ = arguments((2, 4, 3, 3, 3), device, dtype)
    dy = torch.randn_like(x).requires_grad_()
    compare_with_native(*map(gradients_of, (F.squeeze_excitation, chain)), (x, w1, w2, dy))


def test_func_transforms(device):
    args = arguments((2, 4, 2, 3, 3), device, torch.float64)
    args = [a.detach() for a in args]
    tangents = [torch.randn_like(a) for a in args]
    both = (F.squeeze_excitation, chain)
    found, expected = (torch.func.jvp(f, tuple(args), tuple(tangents)) for f in both)
    torch.testing.assert_close(found, expected)
    scalars = [lambda *a, f=f: f(*a).sin().sum() for f in both]
    for argnums in range(5):
        for transform in (torch.func.grad, torch.func.hessian):
            mine, theirs = (transform(f, argnums)(*args) for f in scalars)
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("batched", subsets(5))
def test_vmap(device, batched):
    samples = [arguments((2, 4, 2, 3, 3), device, torch.float64) for _ in range(3)]
    stacked = [
        torch.stack([s[i].detach() for s in samples]) if b else samples[0][i].detach()
        for i, b in enumerate(batched)
    ]
    dims = tuple(0 if b else None for b in batched)
    for function in (
        lambda f: f,
        lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), 0),
        lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), 1),
    ):
        found = torch.vmap(function(F.squeeze_excitation), dims)(*stacked)
        expected = torch.vmap(function(chain), dims)(*stacked)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast(device, lower, input, weight):
    x, *weights = arguments((3, 16, 4, 5, 6), device, torch.float32)
    x = x.detach().to(input).requires_grad_()
    weights = [w.detach().to(weight).requires_grad_() for w in weights]
    with torch.autocast(device, dtype=lower):
        try:
            expected = chain(x, *weights)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                F.squeeze_excitation(x, *weights)
            return
        found = F.squeeze_excitation(x, *weights)
    assert found.dtype == expected.dtype
    exact = chain(x.detach().double(), *(w.detach().double() for w in weights))
    assert_as_good_as_native(found, expected, exact)
    gradients = torch.autograd.grad(found.float().sum(), (x, *weights))
    assert [g.dtype for g in gradients] == [t.dtype for t in (x, *weights)]
    theirs = torch.autograd.grad(expected.float().sum(), (x, *weights))
    for a, b in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0.05, atol=0.05 * float(b.abs().max())
        )


def test_float32_layers(device):
    """Next to a 16-bit input float32 parameters stay as they are, without autocast too."""
    x, *weights = arguments((3, 16, 4, 5, 6), device, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        short = x.detach().to(dtype).requires_grad_()
        output = F.squeeze_excitation(short, *weights)
        assert output.dtype == dtype
        exact = chain(short.detach().double(), *(w.detach().double() for w in weights))
        torch.testing.assert_close(output.double(), exact, rtol=0.02, atol=0.02)
        gradients = torch.autograd.grad(output.float().square().sum(), (short, *weights))
        assert [g.dtype for g in gradients] == [dtype] + [torch.float32] * 4


def test_errors(device):
    x, w1, b1, w2, b2 = (t.detach() for t in arguments((2, 4, 3, 5, 5), device, torch.float32))
    wrong = {
        "input": (
            (x[0, 0], w1, b1, w2, b2),
            (x[:, :0], w1[:, :0], b1, w2[:0], b2[:0]),
            (x.long(), w1, b1, w2, b2),
        ),
        "fc1_weight": (
            (x, w1[:, :3], b1, w2, b2),
            (x, w1[..., 0], b1, w2, b2),
            (x, w1.expand(3, 4, 2, 2), b1, w2, b2),
            (x, w1[:0], b1[:0], w2[:, :0], b2),
            (x, w1.half(), b1, w2, b2),
            (x.bfloat16(), w1.half(), b1.half(), w2.half(), b2.half()),
            (x.double(), w1, b1, w2, b2),
        ),
        "fc1_bias": ((x, w1, b2, w2, b2), (x, w1, b1[None], w2, b2), (x, w1, b1.half(), w2, b2)),
        "fc2_weight": ((x, w1, b1, w1, b2), (x, w1, b1, w2.double(), b2)),
        "fc2_bias": ((x, w1, b1, w2, b1), (x, w1, b1, w2, b2.double())),
    }
    for name, calls in wrong.items():
        for args in calls:
            with pytest.raises(RuntimeError, match=f"squeeze_excitation: {name}: expected"):
                F.squeeze_excitation(*args)
    with pytest.raises(NotImplementedError, match="input"):
        F.squeeze_excitation(x.long(), w1, b1, w2, b2)
    with pytest.raises(RuntimeError, match="activation: expected relu or silu, got gelu"):
        F.squeeze_excitation(x, w1, b1, w2, b2, "gelu")
    with pytest.raises(RuntimeError, match="scale_activation: expected sigmoid or hardsigmoid"):
        F.squeeze_excitation(x, w1, b1, w2, b2, "relu", "tanh")
    for args in ((None, w1, b1, w2, b2), (x, None, b1, w2, b2), (x, w1, b1, w2, "b2")):
        with pytest.raises(TypeError, match="must be Tensor"):
            F.squeeze_excitation(*args)
    with pytest.raises(TypeError, match="'activation' must be str, not int"):
        F.squeeze_excitation(x, w1, b1, w2, b2, 1)


def test_errors_of_the_raw_operators(device):
    x, w1, b1, w2, b2 = (t.detach() for t in arguments((2, 4, 3, 5, 5), device, torch.float32))
    forms = ("relu", "sigmoid")
    output, mean, hidden, scale = ops.squeeze_excitation(x, w1, b1, w2, b2, *forms)
    good = [torch.ones_like(output), x, w1, b1, w2, b2, mean, hidden, scale]
    mask = [True] * 5
    for place, name, wrong in (
        (0, "grad_output", output[:1]),
        (0, "grad_output", output.double()),
        (6, "mean", mean[:, :2]),
        (7, "hidden", hidden.double()),
        (8, "scale", scale[0]),
    ):
        args = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(RuntimeError, match=name):
            ops.squeeze_excitation_backward(*args, *forms, mask)
    for place in (0, 1, 2, 4, 5, 8):
        freed = good[place].clone()
        freed.untyped_storage().resize_(0)
        args = [*good[:place], freed, *good[place + 1 :]]
        with pytest.raises(RuntimeError, match="not allocated"):
            ops.squeeze_excitation_backward(*args, *forms, mask)
    with pytest.raises(RuntimeError, match="scale"):
        ops.squeeze_excitation_backward(*good[:8], scale.clone().requires_grad_(), *forms, mask)
    found = ops.squeeze_excitation_backward(*good, *forms, [False] * 5)
    assert all(gradient is None for gradient in found)


def test_opcheck(device):
    for name, x in layouts(torch.randn(3, 8, 5, 2, device=device)):
        if name.startswith("offset"):
            continue
        weights = layers(8, 4, device, torch.float32)
        forward = ops.squeeze_excitation.default
        opcheck(forward, (x.requires_grad_(), *weights, "silu", "sigmoid"))
        opcheck(forward, (x, weights[0], None, weights[2], None, "relu", "hardsigmoid"))
        kept = [t.detach() for t in ops.squeeze_excitation(x, *weights, "silu", "sigmoid")[1:]]
        dy = torch.randn_like(x).requires_grad_()
        for mask in ([True] * 5, [True, False, False, True, False]):
            opcheck(
                ops.squeeze_excitation_backward.default,
                (dy, x, *weights, *kept, "silu", "sigmoid", mask),
            )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(device, dynamic):
    args = arguments((3, 8, 4, 6, 5), device, torch.float32)
    compiled = torch.compile(F.squeeze_excitation, fullgraph=True, dynamic=dynamic)
    found, expected = compiled(*args), F.squeeze_excitation(*args)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), args),
        torch.autograd.grad(expected.sum(), args),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(4, 48, 12, 14, 14), (140, 24, 6, 28, 27)], ids=str)
def test_same_bits_on_every_run(device, dtype, shape):
    args = arguments(shape, device, dtype)
    args[0] = args[0].detach().to(memory_format=torch.channels_last).requires_grad_()

    def run():
        output = F.squeeze_excitation(*args, "silu")
        return [output, *torch.autograd.grad(output, args, output)]

    first = run()
    for _ in range(3):
        for a, b in zip(run(), first, strict=True):
            assert_same(a, b)


def test_images_do_not_depend_on_each_other(device):
    """A split of few images and none of many give an image nearly the same bits."""
    x, *weights = (t.detach() for t in arguments((140, 24, 6, 40, 30), device, torch.float32))
    x = x.to(memory_format=torch.channels_last)
    whole = F.squeeze_excitation(x, *weights)
    torch.testing.assert_close(F.squeeze_excitation(x[:1], *weights), whole[:1])


def test_explained_plans():
    def plan(n, c, side, layout=torch.channels_last):
        x = torch.empty(n, c, side, side, dtype=torch.bfloat16).to(memory_format=layout)
        weights = torch.empty(4, c), None, torch.empty(c, 4), None
        return warpwright.explain("squeeze_excitation", x, *weights, device="h200").splitlines()[1]

    assert "256 block(s)" in plan(256, 32, 28)
    assert "1 split(s): 16-byte accesses" in plan(256, 32, 28)  # an image per block
    assert "49 split(s)" in plan(2, 32, 224)  # few images
    assert "1 element(s) per access" in plan(2, 33, 9)
    assert "8 element(s) per access" in plan(2, 33, 8, torch.contiguous_format)


def test_no_leak(device):
    args = arguments((2, 8, 4, 6, 5), device, torch.float32)
    assert_no_leak(F.squeeze_excitation, *args)
