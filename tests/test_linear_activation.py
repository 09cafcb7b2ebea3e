"""linear_relu, linear_gelu, linear_silu and mlp against the chain of native ops they replace."""

import functools

import pytest
import torch
import torch.nn.functional as native
from common import assert_no_leak, gradcheck, layouts, opcheck, subsets
from linear_cases import (
    CUDA_SHAPES,
    SHAPES,
    assert_func_transforms_agree,
    operands,
    step,
    unsigned_zeros,
)
from native_suites import Errors, to_single
from native_suites import compare as compare_cases
from torch import nn

import warpwright.functional as F
import warpwright.nn as ours
from warpwright.testing import (
    assert_as_good_as_native,
    assert_same,
    compare_with_native,
    to_double,
)

tanh = {"approximate": "tanh"}
# name of the op's argument -> ours, native's activation
FORMS = {
    "relu": (F.linear_relu, torch.relu),
    "gelu": (F.linear_gelu, native.gelu),
    "gelu_tanh": (
        functools.partial(F.linear_gelu, **tanh),
        functools.partial(native.gelu, **tanh),
    ),
    "silu": (F.linear_silu, native.silu),
}
SMOOTH = [name for name in FORMS if name != "relu"]
ALL = pytest.mark.parametrize("form", FORMS)


def chain(form):
    return lambda *args: FORMS[form][1](native.linear(*args))


def check_values(form, inputs, what, errors):
    fused, reference = FORMS[form][0], chain(form)
    if form != "relu":
        compare_cases(fused, reference, inputs, {}, what, errors, amplifies=True)
        return
    # Near 0 the rounding of either side decides: the gradients are those of our own output's signs.
    exact = reference(*to_double([t if t is None else t.detach() for t in inputs]))
    single = to_single([t if t is None else t.detach() for t in inputs])
    coarse = None if single is None else reference(*single)
    output = fused(*inputs)
    errors.judge(output.detach(), reference(*inputs).detach(), exact, coarse, what, "outputs")
    cotangent = torch.randn_like(output)
    gated = torch.where(output <= 0, 0, cotangent)
    leaves = [t for t in inputs if t is not None]
    grads = torch.autograd.grad(output, leaves, cotangent)
    # Two calls: where one product brings the bias gradient too, another tile may be the fastest.
    expected = torch.autograd.grad(F.linear(*inputs), leaves[:2], gated)
    assert_same(grads[:2], expected)
    of_bias = torch.autograd.grad(F.linear(*inputs), leaves[2:], gated) if leaves[2:] else ()
    for ours_db, linear_db in zip(grads[2:], of_bias, strict=True):
        exact_db = gated.double().reshape(-1, gated.shape[-1]).sum(0)
        errors.judge(ours_db, linear_db, exact_db, None, what, "gradients")


@ALL
def test_values(device, dtype, form):
    errors = Errors()
    for shape in SHAPES:
        for bias in (True, False):
            inputs = operands(device, dtype, *shape, bias=bias)
            check_values(form, inputs, f"{shape} {bias}", errors)
    for m, k, n in ((24, 40, 16), (9, 13, 7)):
        x, weight, bias = operands(device, dtype, (m,), k, n)
        for x_name, x_view in layouts(x.detach()):
            for name, weight_view in layouts(weight.detach()):
                inputs = [t.detach().requires_grad_() for t in (x_view, weight_view, bias)]
                check_values(form, inputs, f"{m}x{n}x{k} {x_name} {name}", errors)
    errors.check()


@pytest.mark.gpu
@ALL
def test_values_of_every_tile(dtype, form):
    errors = Errors()
    for shape in CUDA_SHAPES:
        check_values(form, operands("cuda", dtype, *shape), str(shape), errors)
    errors.check()


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_paths_agree_and_repeat(dtype, shape, form, monkeypatch):
    inputs = operands("cuda", dtype, *shape)
    first = step(FORMS[form][0], inputs)
    for _ in range(3):
        assert_same(step(FORMS[form][0], inputs), first)
    inputs = operands("cuda", dtype, *shape, integers=True)
    first = step(FORMS[form][0], inputs)
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    for other, one in zip(step(FORMS[form][0], inputs), first, strict=True):
        # The activation's values are no integers: sums of them depend on the order.
        slack = 0 if form == "relu" else 4 * torch.finfo(dtype).eps * one.abs().max()
        assert (other - one).abs().max() <= slack


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_tf32(shape, form):
    inputs = operands("cuda", torch.float32, *shape, integers=True)
    exact = chain(form)(*[t.detach().double() for t in inputs])
    torch.backends.cuda.matmul.allow_tf32 = True  # off again before the next test: conftest.py
    torch.testing.assert_close(FORMS[form][0](*inputs).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [((2, 3), 4, 5), ((65,), 33, 67), ((72,), 200, 136)], ids=str)
def test_integers_are_exact(device, dtype, shape):
    inputs = operands(device, dtype, *shape, integers=True)
    assert_same(step(F.linear_relu, inputs), step(chain("relu"), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_integers_are_exact_on_every_tile(dtype, shape):
    # Against float64: native may round the parts of a split product to 16 bits.
    inputs = operands("cuda", dtype, *shape, integers=True)
    exact = step(chain("relu"), [t.detach().double().requires_grad_() for t in inputs])
    assert_same(*map(unsigned_zeros, (step(F.linear_relu, inputs), [t.to(dtype) for t in exact])))


@ALL
def test_kept_preactivation(device, dtype, form):
    """With and without it the output is the same, and it is linear's output."""
    op = torch.ops.warpwright.linear_activation
    for shape in (((65,), 33, 67), ((2, 36), 200, 136)):
        inputs = [t.detach() for t in operands(device, dtype, *shape)]
        plain, nothing = op(*inputs, form)
        output, z = op(*inputs, form, True)
        assert nothing.numel() == 0
        assert_same(output, plain)
        assert_same(z, F.linear(*inputs))


@pytest.mark.parametrize("form", SMOOTH)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_argument(device, low, form):
    """The kernels work these results out only as far as their rounding shows."""
    z = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(low)
    z = z[z.isfinite()].reshape(-1, 64)
    output = FORMS[form][0](z, torch.eye(64, dtype=low, device=device)).double()
    wide = z.double()
    exact = wide * torch.erfc(-wide * 0.5**0.5) / 2 if form == "gelu" else FORMS[form][1](wide)
    info = torch.finfo(low)
    ulp = info.eps * exact.abs().clamp(min=info.tiny).log2().floor().exp2()
    assert ((output - exact).abs() <= 0.75 * ulp + 2.0**-28).all()


@ALL
@pytest.mark.parametrize("shape", [((2, 0), 3, 4), ((3,), 0, 4), ((3,), 4, 0), ((0,), 0, 0)])
def test_empty(device, dtype, shape, form):
    for bias in (True, False):
        inputs = operands(device, dtype, *shape, bias=bias)
        compare_with_native(FORMS[form][0], chain(form), inputs)


@ALL
def test_cotangents(device, dtype, form):
    """Of any layout: expanded (sum().backward()), column-major, strided, misaligned."""
    inputs = operands(device, dtype, (24,), 16, 40)
    output = FORMS[form][0](*inputs)
    dense = torch.randint(-2, 3, (24, 40), device=device).to(dtype)
    expected = torch.autograd.grad(output, inputs, dense, retain_graph=True)
    for _, cotangent in layouts(dense):
        grads = torch.autograd.grad(output, inputs, cotangent, retain_graph=True)
        torch.testing.assert_close(grads, expected)
    ones = torch.autograd.grad(output, inputs, torch.ones_like(output), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), ones)
    x = torch.randn(2, 3, 4, 16, device=device).to(dtype).transpose(0, 2).requires_grad_()
    cotangent = torch.randn(2, 3, 4, 40, device=device).to(dtype).transpose(0, 2)
    output = FORMS[form][0](x, *inputs[1:])
    grads = torch.autograd.grad(output, (x, inputs[1]), cotangent, retain_graph=True)
    same = torch.autograd.grad(output, (x, inputs[1]), cotangent.contiguous())
    torch.testing.assert_close(grads, same)


@ALL
def test_column_sums(device, dtype, form):
    """Long, narrow and wide: the bias gradient and dz in one pass."""
    errors = Errors()
    op = torch.ops.warpwright.linear_activation_backward
    for shape in ((4000, 9), (1, 64), (3, 1000), (513, 24), (70000, 8)):
        kept = torch.randn(shape, device=device).to(dtype)
        dy = torch.randn(shape, device=device).to(dtype)
        dz, db = op(dy, kept, form, True)
        z = kept.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(FORMS[form][1](z), z, dy.double())
        z = kept.detach().requires_grad_()
        (theirs,) = torch.autograd.grad(FORMS[form][1](z), z, dy)
        errors.judge(dz, theirs, exact, None, f"{shape} dz", "gradients")
        errors.judge(db, theirs.sum(0), exact.sum(0), None, f"{shape} db", "gradients")
        assert_same(op(dy, kept, form, True), (dz, db))
        alone, none = op(dy, kept, form, False)
        assert_same(alone, dz)
        assert none is None or none.numel() == 0
    errors.check()


@ALL
def test_special_values(device, dtype, form):
    """NaN and infinities, in z and in what the gradient makes of them, as native."""
    z = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, 1e-30, -30.0, 30.0, 80.0, -80.0])
    x = z.to(device=device, dtype=dtype)[:, None].requires_grad_()
    # Against float64: native's vectorised gelu makes NaN of infinity in float.
    exact_x = x.detach().double().requires_grad_()
    results = []
    for function, argument in ((FORMS[form][0], x), (chain(form), exact_x)):
        y = function(argument, torch.ones_like(argument[:1].detach()))
        (grad,) = torch.autograd.grad(y, argument, torch.ones_like(y))
        results.append((y.double(), grad.double()))
    torch.testing.assert_close(*results, equal_nan=True, rtol=1e-2, atol=1e-4)
    large = torch.tensor([[3e38], [-3e38], [1e25], [-1e25]], device=device)
    assert torch.equal(F.linear_silu(large, torch.ones(1, 1, device=device)) > 0, large > 0)


@ALL
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradients(device, needs, form):
    shapes = [(2, 2, 3), (4, 3), (4,)]
    inputs = [
        torch.randn(s, device=device, dtype=torch.float64, requires_grad=need)
        for s, need in zip(shapes, needs, strict=True)
    ]
    gradcheck(FORMS[form][0], inputs)
    if not needs[2]:
        gradcheck(lambda x, w: FORMS[form][0](x, w), inputs[:2])


@pytest.mark.parametrize("form", SMOOTH)
def test_gradients_of_the_kept_preactivation(device, form):
    f64 = {"device": device, "dtype": torch.float64, "requires_grad": True}
    inputs = [torch.randn(s, **f64) for s in ((3, 2), (4, 2), (4,))]
    gradcheck(lambda *a: torch.ops.warpwright.linear_activation(*a, form, True), inputs)
    gradcheck(lambda *a: torch.ops.warpwright.linear_activation(*a, form, True)[1], inputs)
    dy, z = torch.randn(3, 4, **f64), torch.randn(3, 4, **f64)
    backward = torch.ops.warpwright.linear_activation_backward
    gradcheck(lambda dy, z: backward(dy, z, form, True), (dy, z))


@pytest.mark.parametrize("form", SMOOTH)
def test_third_derivative(device, form):
    x = torch.linspace(-4, 4, 33, device=device, dtype=torch.float64)[:, None].requires_grad_()
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    results = []
    for function in (FORMS[form][0], chain(form)):
        values = [function(x, one)]
        for _ in range(3):
            values += torch.autograd.grad(values[-1].sum(), x, create_graph=True)
        results.append(values)
    torch.testing.assert_close(*results)


@ALL
def test_func_transforms(device, form):
    assert_func_transforms_agree(device, FORMS[form][0], chain(form))


@ALL
def test_opcheck(device, form):
    ops = torch.ops.warpwright
    x, w, b = operands(device, torch.float32, (2, 3), 4, 5)
    dy = torch.randn(2, 3, 5, device=device, requires_grad=True)
    for keep in (False, True):
        opcheck(ops.linear_activation.default, (x, w, b, form, keep))
    opcheck(ops.linear_activation.default, (x, w, None, form))
    opcheck(ops.linear_activation.default, (x[0, 0], w.detach(), b, form))
    opcheck(ops.linear_activation.default, (x, w[0], None, form))
    z = F.linear(x, w, b).detach().requires_grad_(form != "relu")
    for bias in (False, True):
        opcheck(ops.linear_activation_backward.default, (dy, z, form, bias))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    """The op compiles. The functional is that op in training on a GPU, elsewhere two, of which
    the activation is native's."""

    def run(x, w, b, linear):
        y = x
        for form, weight, bias in zip(FORMS, (w, w.t()) * 2, (b, None) * 2, strict=True):
            y = linear(y, weight, bias, form)
        return y

    def raw(x, w, b, form):
        return torch.ops.warpwright.linear_activation(x, w, b, form)[0]

    def apart(x, w, b, form):
        return FORMS[form][1](F.linear(x, w, b))

    def functional(x, w, b, form):
        return FORMS[form][0](x, w, b)

    as_traced = functional if device == "cuda" else apart
    for eager, traced in ((raw, raw), (as_traced, functional)):
        torch.compiler.reset()
        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for m in (8, 13):
            inputs = operands(device, torch.float32, (m,), 6, 5)
            expected, actual = run(*inputs, eager), compiled(*inputs, traced)
            assert_same(actual, expected)
            assert_same(
                torch.autograd.grad(actual.sum(), inputs),
                torch.autograd.grad(expected.sum(), inputs),
            )


@ALL
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low, form):
    inputs = operands(device, torch.float32, (6,), 8, 4, integers=True)
    with torch.autocast(device, dtype=low):
        output, theirs = FORMS[form][0](*inputs), chain(form)(*inputs)
    assert output.dtype == theirs.dtype == low
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = chain(form)(*doubles)
    assert_as_good_as_native(output, theirs, exact)
    grads = [
        torch.autograd.grad(result.sum(), leaves)
        for result, leaves in ((output, inputs), (theirs, inputs), (exact, doubles))
    ]
    for grad, native_grad, exact_grad in zip(*grads, strict=True):
        # float32 copies of 16-bit values
        assert_as_good_as_native(grad.to(low), native_grad.to(low), exact_grad)


@ALL
def test_what_the_kernels_do_not_take(device, form):
    """Vectors of weights and biases that broadcast."""
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weight = torch.randn(3, 4, device=device, requires_grad=True)
    for bias_shape in ((), (1,), (2, 3), (2, 1)):
        bias = torch.randn(bias_shape, device=device, requires_grad=True)
        compare_with_native(FORMS[form][0], chain(form), (x, weight, bias))
    compare_with_native(FORMS[form][0], chain(form), (x, weight[0].detach().requires_grad_()))
    with torch.inference_mode():
        args = (x, weight, bias)
        torch.testing.assert_close(FORMS[form][0](*args), chain(form)(*args))


def test_native_types():
    inputs = [torch.randint(-3, 4, s) for s in ((2, 3), (5, 3), (5,))]
    assert torch.equal(F.linear_relu(*inputs), chain("relu")(*inputs))
    complex_inputs = [(t + 1j * t.flip(0)).to(torch.complex64) for t in inputs]
    assert torch.equal(F.linear_silu(*complex_inputs), chain("silu")(*complex_inputs))
    for function, form in ((F.linear_gelu, "gelu"), (F.linear_silu, "silu")):
        for call in (function, chain(form)):
            with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
                call(*inputs)


def test_only_what_is_needed_is_kept(device):
    x = torch.randn(4, 3, device=device, requires_grad=True)
    weight = torch.randn(2, 3, device=device)
    output = F.linear_gelu(x, weight)  # keeps weight and z, but not x
    expected = torch.autograd.grad(chain("gelu")(x, weight).sum(), x)
    with torch.no_grad():
        x.zero_()
        output.zero_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x), expected)
    output = F.linear_relu(x, weight)
    output += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@ALL
def test_memory_goes_with_the_output(device, form):
    inputs = operands(device, torch.float32, (4,), 3, 2)
    assert_no_leak(FORMS[form][0], *inputs)


def test_bad_input(device):
    def t(*shape, **kwargs):
        return torch.ones(shape, device=device, **kwargs)

    for function in (F.linear_relu, F.linear_gelu, F.linear_silu):
        for message, inputs in (
            (r"at least 1D, but they are 0D and 2D", (t(), t(3, 4))),
            (r"input: expected 4 features, got 5: mat1 and mat2", (t(2, 5), t(3, 4))),
            (r"expanded size of the tensor \(3\) must match", (t(2, 4), t(3, 4), t(4))),
            (r"weight: .*same dtype.*Double and Float", (t(2, 4, dtype=torch.float64), t(3, 4))),
            (r"weight: Expected all tensors to be on the same", (t(2, 4), t(3, 4).to("meta"))),
        ):
            with pytest.raises(RuntimeError, match=message):
                function(*inputs)
    with pytest.raises(RuntimeError, match="linear_gelu: approximate: expected 'none' or 'tanh'"):
        F.linear_gelu(t(2, 4), t(3, 4), approximate="erf")
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        native.gelu(t(2, 4), approximate="erf")
    with pytest.raises(RuntimeError, match=r"activation: expected one of .*, got 'elu'"):
        F.mlp(t(2, 4), t(3, 4), None, t(4, 3), activation="elu")
    backward = torch.ops.warpwright.linear_activation_backward
    with pytest.raises(RuntimeError, match=r"kept: expected shape \[2, 3\], got \[2, 4\]"):
        backward(t(2, 3), t(2, 4), "relu", True)
    with pytest.raises(RuntimeError, match="kept: expected the same dtype"):
        backward(t(2, 3), t(2, 3, dtype=torch.float64), "relu", True)


@ALL
def test_mlp(device, dtype, form):
    x, w1, b1 = operands(device, dtype, (2, 9), 24, 40)
    _, w2, b2 = operands(device, dtype, (), 40, 16)
    errors = Errors()
    for biases in ((b1, b2), (b1, None), (None, b2), (None, None)):
        mlp = F.mlp(x, w1, biases[0], w2, biases[1], form)
        chained = F.linear(FORMS[form][0](x, w1, biases[0]), w2, biases[1])
        assert_same(mlp, chained)
        compare_cases(
            lambda x, w1, b1, w2, b2: F.mlp(x, w1, b1, w2, b2, form),
            lambda x, w1, b1, w2, b2: native.linear(chain(form)(x, w1, b1), w2, b2),
            (x, w1, biases[0], w2, biases[1]),
            {},
            str([b is not None for b in biases]),
            errors,
            amplifies=True,
        )
    errors.check()


MODULES = [
    (ours.LinearReLU, {}, nn.ReLU()),
    (ours.LinearGELU, {}, nn.GELU()),
    (ours.LinearGELU, {"approximate": "tanh"}, nn.GELU(approximate="tanh")),
    (ours.LinearSiLU, {}, nn.SiLU()),
]


@pytest.mark.parametrize("case", MODULES, ids=lambda case: f"{case[0].__name__}{case[1]}")
@pytest.mark.parametrize("bias", [True, False])
def test_modules(device, case, bias):
    cls, kwargs, activation = case
    module = cls(6, 5, bias=bias, device=device, **kwargs)
    linear = nn.Linear(6, 5, bias=bias, device=device)
    linear.load_state_dict(module.state_dict())
    module.load_state_dict(linear.state_dict())
    x = torch.randn(3, 6, device=device, requires_grad=True)
    torch.testing.assert_close(module(x), activation(linear(x)))
    assert repr(module).startswith(f"warpwright.{cls.__name__}(in_features=6, out_features=5")
    assert all(repr(v) in repr(module) for v in kwargs.values())
    linear.__class__ = cls  # what a fusion of modules does
    for name, value in kwargs.items():
        setattr(linear, name, value)
    assert_same(linear(x), module(x))


@pytest.mark.parametrize("form", FORMS)
def test_mlp_module(device, form):
    module = ours.MLP(6, 12, 5, form, device=device)
    x = torch.randn(3, 6, device=device)
    fc1, fc2 = module.fc1, module.fc2
    expected = F.mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, form)
    assert_same(module(x), expected)
    assert sorted(module.state_dict()) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert ours.MLP(4, 8, bias=False).fc2.weight.shape == (4, 8)
    with pytest.raises(ValueError, match="activation: expected one of relu, gelu"):
        ours.MLP(4, 8, activation="elu")
