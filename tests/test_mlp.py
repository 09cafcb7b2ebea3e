"""mlp as one node: derivatives, autocast, which calls it takes, the kernel of its hidden layer."""

import pytest
import torch
import torch.nn.functional as native
from common import gradcheck, subsets
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, assert_same, compare_with_native

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": native.gelu,
    "gelu_tanh": lambda z: native.gelu(z, approximate="tanh"),
    "silu": native.silu,
}
forms = pytest.mark.parametrize("form", ACTIVATIONS)
LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
NODE = "WarpwrightMlpBackward"
# Rows, features, hidden features, outputs: large enough for the kernel's tile, and at its edges.
LARGE = [
    (2048, 256, 1024, 256),
    (1000, 200, 1544, 136),
    (4099, 64, 2304, 328),
    (512, 768, 3072, 768),
]


def operands(device, dtype, rows=(2, 9), features=24, hidden=40, outputs=16, scale=1.0):
    """Leaves: x, W1, b1, W2, b2."""
    shapes = (*rows, features), (hidden, features), (hidden,), (outputs, hidden), (outputs,)
    scales = 1, features**-0.5, 1, hidden**-0.5, 1
    return [
        (torch.randn(s, device=device) * c * scale).to(dtype).requires_grad_()
        for s, c in zip(shapes, scales, strict=True)
    ]


def ours(form):
    return lambda *a: F.mlp(*a, form)


def chained(form):
    """Two nodes of ours."""
    op = torch.ops.warpwright.linear_activation
    return lambda x, w1, b1, w2, b2: F.linear(op(x, w1, b1, form)[0], w2, b2)


def reference(form):
    f = ACTIVATIONS[form]
    return lambda x, w1, b1, w2, b2: native.linear(f(native.linear(x, w1, b1)), w2, b2)


def step(function, inputs, cotangent=None):
    y = function(*inputs)
    cotangent = torch.ones_like(y) if cotangent is None else cotangent.to(y.dtype)
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]


# ---- derivatives ----


@forms
def test_values(device, dtype, form):
    for biases in [*subsets(2), (False, False)]:
        x, w1, b1, w2, b2 = operands(device, dtype)
        inputs = x, w1, b1 if biases[0] else None, w2, b2 if biases[1] else None
        assert_same(F.mlp(*inputs, form), chained(form)(*inputs))
        if dtype == torch.float64:
            for mine, theirs in zip(
                step(ours(form), inputs), step(reference(form), inputs), strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        elif form != "relu":  # near 0 the rounding of either side decides
            compare_with_native(ours(form), reference(form), inputs)


@forms
@pytest.mark.parametrize("needs", subsets(5), ids=str)
def test_each_gradient(device, form, needs):
    """Of any set of operands the gradients of two nodes, on the CPU to the bit."""
    inputs = operands(device, torch.float32)
    for tensor, need in zip(inputs, needs, strict=True):
        tensor.requires_grad_(need)
    y = F.mlp(*inputs, form)
    assert (y.grad_fn.name() == NODE) == any(needs[:3])
    cotangent = torch.randn_like(y)
    mine, theirs = (step(f(form), inputs, cotangent) for f in (ours, chained))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@forms
def test_second_derivatives(form):
    inputs = operands("cpu", torch.float64, (3,), 4, 5, 2)
    gradcheck(ours(form), inputs)
    torch.autograd.gradgradcheck(ours(form), inputs)


def test_a_graph_of_the_first_derivative(device):
    """Gradients of the gradients equal those of two nodes."""
    inputs = operands(device, torch.float64)
    results = []
    for function in (ours("gelu"), chained("gelu")):
        y = function(*inputs)
        grads = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        results.append(torch.autograd.grad(total, inputs))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


# ---- autocast ----


@LOW
@forms
def test_autocast(device, low, form):
    inputs = operands(device, torch.float32, (2, 33), 40, 64, 24)
    x = inputs[0] * 1  # not a leaf, as inside a model
    cotangent = torch.randn(2, 33, 24, device=device)
    results = []
    for function in (ours(form), chained(form), reference(form)):
        with torch.autocast(device, low):
            y = function(x, *inputs[1:])
        assert y.dtype == low
        results.append([y, *torch.autograd.grad(y, inputs, cotangent.to(low), retain_graph=True)])
    with torch.autocast(device, low):
        assert F.mlp(x, *inputs[1:], form).grad_fn.name() == NODE
    if form == "relu":
        return
    rounded = [t.detach().to(low).double().requires_grad_() for t in inputs]
    exact = step(reference(form), rounded, cotangent.to(low).double())
    for mine, two, theirs, value in zip(*results, exact, strict=True):
        assert mine.dtype == two.dtype
        assert_as_good_as_native(mine.float(), theirs.float(), value)


def test_autocast_of_16_bit_weights(device):
    inputs = operands(device, torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        y = F.mlp(*inputs, "gelu")
    assert y.grad_fn.name() == NODE
    grads = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert {g.dtype for g in grads} == {torch.bfloat16}
    mixed = [inputs[0], *(t.detach().float().requires_grad_() for t in inputs[1:3]), *inputs[3:]]
    with torch.autocast(device, torch.bfloat16):
        y = F.mlp(*mixed, "gelu")
    assert [g.dtype for g in torch.autograd.grad(y, mixed, torch.ones_like(y))] == [
        t.dtype for t in mixed
    ]


# ---- which calls are one node ----


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_who_watches_ops_sees_two_nodes():
    inputs = operands("cpu", torch.float32)
    with Watch():
        assert F.mlp(*inputs, "gelu").grad_fn.name() == "WarpwrightLinearBackward"
    with torch.no_grad():
        assert F.mlp(*inputs, "gelu").grad_fn is None
    frozen = [t.detach() for t in inputs[:3]]
    assert F.mlp(*frozen, *inputs[3:], "gelu").grad_fn.name() == "WarpwrightLinearBackward"


def test_transforms():
    x, *rest = (t.detach() for t in operands("cpu", torch.float32, (3, 5)))
    function = ours("gelu_tanh")
    expected = torch.stack([function(sample, *rest) for sample in x])
    torch.testing.assert_close(torch.vmap(lambda s: function(s, *rest))(x), expected)
    grad = torch.func.grad(lambda s: function(s, *rest).square().sum())(x)
    leaf = x.clone().requires_grad_()
    function(leaf, *rest).square().sum().backward()
    torch.testing.assert_close(grad, leaf.grad)
    _, tangent = torch.func.jvp(lambda s: function(s, *rest), (x,), (torch.ones_like(x),))
    _, theirs = torch.func.jvp(
        lambda s: reference("gelu_tanh")(s, *rest), (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent, theirs, rtol=1e-4, atol=1e-4)


def test_errors_name_the_argument():
    x, w1, b1, w2, b2 = operands("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="activation: expected one of 'relu', 'gelu'"):
        F.mlp(x, w1, b1, w2, b2, "elu")
    with pytest.raises(RuntimeError, match="mlp: input: expected 24 features, got 23"):
        F.mlp(x[..., :-1], w1, b1, w2, b2)
    with pytest.raises(
        RuntimeError, match="mlp: weight2: expected 40 columns, the rows of weight1, got 39"
    ):
        F.mlp(x, w1, b1, w2[:, :-1], b2)
    with pytest.raises(RuntimeError, match="same dtype"):
        F.mlp(x, w1, b1, w2.double(), b2)


def test_nothing_is_saved_that_no_gradient_reads():
    inputs = operands("cpu", torch.float32)
    saved, hidden = [], (2, 9, 40)
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    )
    with keep:
        F.mlp(*inputs, "gelu")
        # x, W1, W2, the hidden layer, its pre-activation
        operand_shapes = [tuple(inputs[i].shape) for i in (0, 1, 3)]
        assert sorted(saved) == sorted([*operand_shapes, hidden, hidden])
        saved.clear()
        frozen = [inputs[0], *(t.detach() for t in inputs[1:])]
        F.mlp(*frozen, "gelu")
        assert sorted(saved) == sorted([*operand_shapes[1:], hidden])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(device, use_reentrant):
    inputs = operands(device, torch.float32)
    found = []
    for run in (ours("gelu"), lambda *a: checkpoint(ours("gelu"), *a, use_reentrant=use_reentrant)):
        for leaf in inputs:
            leaf.grad = None
        run(*inputs).sum().backward()
        found.append([leaf.grad for leaf in inputs])
    assert_same(*found)


def test_twice_and_released(device):
    inputs = operands(device, torch.float32)
    y = F.mlp(*inputs, "gelu").sum()
    first = torch.autograd.grad(y, inputs, retain_graph=True)
    assert_same(torch.autograd.grad(y, inputs), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs)


# ---- weights that a layer holds transposed ----


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_transposed_weights(device, low):
    """As of transformers' Conv1D. Gradients have the parameters' layout."""
    x, w1, b1, w2, b2 = operands(device, torch.float32, (2, 33), 40, 64, 24)
    stored = [w.detach().t().contiguous().requires_grad_() for w in (w1, w2)]
    x = x * 1
    with torch.autocast(device, low, enabled=low is not None):
        y = F.mlp(x, stored[0].t(), b1, stored[1].t(), b2, "gelu")
        expected = F.mlp(x, w1, b1, w2, b2, "gelu")
    cotangent = torch.randn_like(y)
    mine = torch.autograd.grad(y, [*stored, b1, b2], cotangent)
    theirs = torch.autograd.grad(expected, [w1, w2, b1, b2], cotangent)
    for grad, parameter in zip(mine, [*stored, b1, b2], strict=True):
        assert grad.stride() == parameter.stride()
    tolerance = {} if low is None else {"rtol": 2e-2, "atol": 2e-2}
    for i in range(2):
        torch.testing.assert_close(mine[i].t(), theirs[i], **tolerance)
    for i in (2, 3):
        torch.testing.assert_close(mine[i], theirs[i], **tolerance)


# ---- the kernel ----


@pytest.mark.gpu
@forms
@LOW
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel(low, form, shape, transposed, monkeypatch):
    rows, features, hidden, outputs = shape
    inputs = operands("cuda", low, (rows,), features, hidden, outputs)
    if transposed:
        inputs[3] = inputs[3].detach().t().contiguous().t().requires_grad_()
    cotangent = torch.randn(rows, outputs, device="cuda")
    first = step(ours(form), inputs, cotangent)
    for _ in range(3):
        assert_same(step(ours(form), inputs, cotangent), first)
    double = [t.detach().double().requires_grad_() for t in inputs]
    exact = step(reference(form), double, cotangent.to(low).double())
    theirs = step(reference(form), inputs, cotangent)
    for i, (mine, other, value) in enumerate(zip(first, theirs, exact, strict=True)):
        if form == "relu" and i:  # near 0 the rounding of either side decides
            assert (mine.double() - value).norm() <= 2e-2 * value.norm()
            continue
        assert_as_good_as_native(mine, other, value)
        errors = ((t.double() - value).norm() for t in (mine, other))
        assert next(errors) <= 1.5 * next(errors) + torch.finfo(low).eps * value.norm() / 8
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    for mine, other in zip(first, step(ours(form), inputs, cotangent), strict=True):
        assert (mine - other).norm() <= 1e-2 * other.norm()


@pytest.mark.gpu
@LOW
def test_special_values(low):
    """Infinities and NaN of dy and z come out where two kernels have them."""
    inputs = operands("cuda", low, (1024,), 128, 1024, 128)
    cotangent = torch.randn(1024, 128, device="cuda")
    cotangent[3, 5], cotangent[700, 1] = float("inf"), float("nan")
    with torch.no_grad():
        inputs[0][9, 0], inputs[0][1023, 127] = float("nan"), float("inf")
    mine, two = (step(f("gelu_tanh"), inputs, cotangent)[1] for f in (ours, chained))
    assert_same(mine.isnan(), two.isnan())


@pytest.mark.gpu
@forms
def test_the_kernels_gradient_alone(form):
    """dz itself, by a first layer that is the identity: dx = dz."""
    n, outputs = 1024, 512
    for low in (torch.bfloat16, torch.float16):
        z, dy = (torch.randn(2048, k, device="cuda").to(low) for k in (n, outputs))
        z = (z * 3).requires_grad_()
        eye = torch.eye(n, device="cuda", dtype=low)
        w2 = (torch.randn(outputs, n, device="cuda") / 16).to(low)
        (dz,) = torch.autograd.grad(F.mlp(z, eye, None, w2, None, form), z, dy)
        exact_z = z.detach().double().requires_grad_()
        value = ACTIVATIONS[form](exact_z)
        (exact,) = torch.autograd.grad(value, exact_z, dy.double() @ w2.double())
        assert (dz.double() - exact).abs().max() <= torch.finfo(low).eps * exact.abs().max()
        assert (dz.double() - exact).norm() <= torch.finfo(low).eps * exact.norm()


@pytest.mark.gpu
def test_one_kernel_less():
    """The hidden gradient and its column sums have no pass of their own."""
    inputs = operands("cuda", torch.bfloat16, (4099,), 768, 3072, 768)
    y = F.mlp(*inputs, "gelu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        torch.cuda.synchronize()
    names = [e.name for e in profile.events()]
    assert any("ActivationGradientEpilogue" in n for n in names)
    assert not any("ActivationGradientColumns" in n for n in names)


def test_explain(device):
    gpu = {"device": "cuda"} if device == "cuda" else {}
    x, w1, b1, w2, b2 = operands(device, torch.bfloat16, (2048,), 256, 1024, 256)
    text = warpwright.explain("mlp", x, w1, b1, w2, b2, **gpu)
    assert "2 grad_weight" in text or device == "cpu"
