import itertools
import re
import subprocess
import sys

import pytest
import torch
from common import gradcheck, layouts, opcheck, subsets

import warpwright.functional as F
from warpwright import _C
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.linear

# (batch, in, out) and why
SHAPES = [
    ((), 5, 3),  # one vector
    ((1,), 1, 1),
    ((2, 3), 4, 5),  # leading dimensions fold
    ((65,), 33, 67),  # odd everything: no operand has aligned rows
    ((64,), 3136, 128),  # the MNIST CNN: k is long, the output small
    ((64,), 128, 10),  # ... and its last layer
    ((200,), 72, 136),  # aligned rows, ragged tiles
    ((1, 257), 64, 1),
    ((7, 1, 3), 200, 264),
]
# Large enough for every tile of the CUDA path, and for split-k.
CUDA_SHAPES = [
    ((2048,), 512, 2048),
    ((1000,), 520, 1032),
    ((512,), 3136, 128),
    ((16,), 4096, 4096),
    ((4096,), 136, 8),
    # float32, few rows: each count of them, ragged columns, a k that not every warp takes part in
    ((1,), 4096, 4096),
    ((2,), 72, 40),
    ((3,), 1032, 264),
    ((8,), 2056, 1003),
    ((9,), 8, 24),
    ((1,), 16384, 8),  # too long for so few columns
    # sm_90a: ragged tiles of each size; rows of the output that TMA cannot store
    ((2000,), 520, 2056),
    ((2040,), 4096, 2040),  # the largest tile of TF32, forward and gradient of the weight
    ((1000,), 1000, 1008),
    ((520,), 1160, 1003),
    ((200,), 2056, 264),
    ((4000,), 520, 136),  # clusters of two, as the shapes of 1000 rows
    ((760,), 760, 760),  # ... of four
    # operands that TMA cannot load: both of a product, one of them; k of one stage, of many
    ((1023,), 1001, 515),
    ((640,), 776, 333),
    ((640,), 333, 776),
    ((4100,), 9, 1030),
    ((130,), 4099, 132),
    ((4100,), 9, 4099),
    ((1023,), 9, 4099),
    ((96,), 1003, 4099),
    ((96,), 1003, 1030),
    # ... that are copied to aligned rows first, or whose dy is
    ((4096,), 1025, 1027),
    ((2048,), 768, 5003),
    ((64,), 2048, 2050),
    # few rows, and enough of a weight that its gradient in 16 bits is an outer product
    ((1,), 1096, 1032),
    ((31,), 1032, 1288),
    ((96,), 2056, 520),
    # a classifier's head: as large as its kernels take it, one beyond each limit
    ((512,), 1024, 16),
    ((301,), 200, 3),
    ((40,), 1, 16),  # one feature: contiguous across
    ((513,), 130, 10),
    ((512,), 130, 17),
    ((512,), 1025, 10),
]


def operands(device, dtype, batch, in_features, out_features, bias=True, integers=False):
    shapes = [(*batch, in_features), (out_features, in_features), (out_features,)]
    result = [
        (torch.randint(-3, 4, s, device=device) if integers else torch.randn(s, device=device))
        .to(dtype)
        .requires_grad_()
        for s in shapes
    ]
    return result if bias else [*result[:2], None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(device, dtype, shape, bias):
    compare_with_native(F.linear, native, operands(device, dtype, *shape, bias=bias))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_values_of_every_tile(dtype, shape):
    compare_with_native(F.linear, native, operands("cuda", dtype, *shape))


@pytest.mark.parametrize("shape", [((2, 0), 3, 4), ((3,), 0, 4), ((3,), 4, 0), ((0,), 0, 0)])
def test_empty(device, dtype, shape):
    for bias in (True, False):
        compare_with_native(F.linear, native, operands(device, dtype, *shape, bias=bias))


def step(function, inputs):
    """Output and all gradients, from a cotangent of small integers."""
    output = function(*inputs)
    cotangent = (torch.arange(output.numel(), device=output.device) % 5 - 2).to(output.dtype)
    leaves = [t for t in inputs if t is not None]
    return [output, *torch.autograd.grad(output, leaves, cotangent.view(output.shape))]


@pytest.mark.parametrize("shape", [((2, 3), 4, 5), ((65,), 33, 67), ((72,), 200, 136)], ids=str)
def test_integers_are_exact(device, dtype, shape):
    inputs = operands(device, dtype, *shape, integers=True)
    assert_same(step(F.linear, inputs), step(native, inputs))


def unsigned_zeros(tensors):
    """A sum of one product may be that product, -0, or be added to 0."""
    return [t + 0 for t in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_integers_are_exact_on_every_tile(dtype, shape):
    # Against float64: native may round the parts of a split product to 16 bits.
    inputs = operands("cuda", dtype, *shape, integers=True)
    exact = step(native, [t.detach().double().requires_grad_() for t in inputs])
    assert_same(*map(unsigned_zeros, (step(F.linear, inputs), [t.to(dtype) for t in exact])))


def products_of_shapes(dtype, tf32=False):
    """(role, sizes, explain's words) of each product that CUDA_SHAPES lead to on an H100."""
    for batch, k, n in CUDA_SHAPES:
        x, weight = _C.Operand([*batch, k], [k, 1], 0), _C.Operand([n, k], [k, 1], 0)
        for role, text in _C.explain_linear(dtype, tf32, x, weight, _C.DeviceInfo(), True):
            if role != "grad_bias":
                yield role, (*batch, k, n), text


def test_the_shapes_reach_every_tile():
    found = set()
    for role, _, text in products_of_shapes("bfloat16"):
        found.add((role, text.split(" (")[0].split(", A ")[0]))
        found.add("split-k" if "split-k" in text else "whole k")
        found.update((role, words) for words in re.findall(r"clusters of \d", text))
        found.update((role, words) for words in re.findall(r"\w+ realigned", text))
    for role in ("forward", "grad_input", "grad_weight"):
        for tile in ("128x128 ping-pong", "128x64,", "64x64 ping-pong"):
            assert any(f"wgmma, tile {tile}" in t[1] for t in found if t[0] == role), (role, tile)
        assert (role, "clusters of 4") in found
        for operand in ("both",) if role == "forward" else ("A", "B", "both"):
            assert (role, f"{operand} realigned") in found
    assert {"split-k", "whole k", ("forward", "clusters of 2")} <= found
    assert any("outer product" in t[1] for t in found if t[0] == "grad_weight")


def test_the_shapes_reach_every_tf32_product():
    found = set()
    for role, _, text in products_of_shapes("float32", tf32=True):
        tile = re.search(r"wgmma, tile (\d+x\d+)|$", text)[1]
        found.add((role, tile, "B by registers" in text, "A transposed" in text))
        found.add((role, "split-k" in text))
    assert ("forward", "128x256", False, False) in found
    for tile in ("128x128", "128x64"):
        assert ("forward", tile, False, False) in found
        assert ("grad_input", tile, True, False) in found
    for tile in ("128x256", "128x128"):
        assert ("grad_weight", tile, True, True) in found
    assert {("grad_input", True), ("grad_weight", True)} <= found


def test_the_shapes_reach_every_float32_product():
    found = set()
    for role, sizes, text in products_of_shapes("float32"):
        tile = re.search(r"fp32 FMA, tile (\d+x\d+)|$", text)[1]
        whole = all(extent % 128 == 0 for extent in sizes)
        found.add((role, tile, whole, "split-k" in text))
    for role in ("forward", "grad_input", "grad_weight"):
        assert {(role, "128x128", False, True), (role, "64x64", False, True)} <= found
        assert {(role, "128x128", True, split) for split in (True, False)} & found


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_paths_agree_and_repeat(dtype, shape, monkeypatch):
    inputs = operands("cuda", dtype, *shape)
    first = step(F.linear, inputs)
    for _ in range(3):
        assert_same(step(F.linear, inputs), first)
    inputs = operands("cuda", dtype, *shape, integers=True)
    first = step(F.linear, inputs)
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    assert_same(step(F.linear, inputs), first)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_tf32_integers_are_exact_on_every_tile(shape):
    inputs = operands("cuda", torch.float32, *shape, integers=True)
    exact = step(native, [t.detach().double().requires_grad_() for t in inputs])
    torch.backends.cuda.matmul.allow_tf32 = True  # off again before the next test: conftest.py
    assert_same(*map(unsigned_zeros, (step(F.linear, inputs), [t.float() for t in exact])))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_tf32_paths_agree_and_repeat(shape, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = True  # off again before the next test: conftest.py
    inputs = operands("cuda", torch.float32, *shape)
    first = step(F.linear, inputs)
    for _ in range(3):
        assert_same(step(F.linear, inputs), first)
    inputs = operands("cuda", torch.float32, *shape, integers=True)
    first = step(F.linear, inputs)
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    assert_same(*map(unsigned_zeros, (step(F.linear, inputs), first)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1096, 1032), (4096, 600)], ids=str)
def test_outer_product_of_every_count_of_rows(dtype, sizes):
    in_features, out_features = sizes
    weight = torch.zeros(out_features, in_features, dtype=dtype, device="cuda", requires_grad=True)
    bias = torch.zeros(out_features, dtype=dtype, device="cuda", requires_grad=True)
    for rows in range(1, 97):
        # Rows of x and of the cotangent that lie apart.
        x, dy = (
            torch.randint(-3, 4, (rows, size + 8 * (rows % 3)), device="cuda").to(dtype)[:, :size]
            for size in sizes
        )
        y = F.linear(x, weight, bias)
        first, second = (
            torch.autograd.grad(y, (weight, bias), dy, retain_graph=True) for _ in range(2)
        )
        exact = [t.to(dtype) for t in (dy.double().t() @ x.double(), dy.double().sum(0))]
        assert_same(unsigned_zeros(first), unsigned_zeros(exact))
        assert_same(second, first)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(77, 130, 11), (1, 1, 1), (16, 33, 1)], ids=str)
def test_head_of_any_strides(dtype, sizes):
    rows, features, outputs = sizes

    def integers(rows, cols):
        return torch.randint(-3, 4, (rows, cols), device="cuda").to(dtype)

    # Rows that lie apart and start at no multiple of 4 bytes; dy in either direction.
    x, weight = (integers(n, features + 4)[:, 1:-3] for n in (rows, outputs))
    bias = integers(1, outputs)[0]
    exact = native(x.double(), weight.double(), bias.double()).to(dtype)
    assert_same(*map(unsigned_zeros, ([F.linear(x, weight, bias)], [exact])))
    for dy in (integers(rows, outputs + 5)[:, 2:-3], integers(outputs, rows).t()):
        exact = [dy.double() @ weight.double(), dy.double().t() @ x.double(), dy.double().sum(0)]
        for mask in itertools.product([True, False], repeat=3):
            found = torch.ops.warpwright.linear_backward(dy, x, weight, mask)
            wanted = [t.to(dtype) for t, want in zip(exact, mask, strict=True) if want]
            assert_same(*map(unsigned_zeros, ([t for t in found if t is not None], wanted)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 128, 20), (512, 3136, 128), (64, 4096, 512)], ids=str)
def test_gradients_side_by_side(dtype, shape):
    # The kernels of one backward may run at the same time, with each other and with nothing else.
    rows, k, n = shape
    x, weight, dy = (
        torch.randn(s, device="cuda").to(dtype) for s in ((rows, k), (n, k), (rows, n))
    )
    backward = torch.ops.warpwright.linear_backward
    torch.cuda.synchronize()
    dx = backward(dy, x, weight, [True, False, False])[0]
    torch.cuda.synchronize()
    # The bias's gradient may come with the weight's.
    alone = [dx, *backward(dy, x, weight, [False, True, True])[1:]]
    torch.cuda.synchronize()
    for _ in range(300):
        written = dy * 1  # right before it
        together = backward(written, x, weight, [True, True, True])
        read = [t + 0 for t in together]  # right after it
        written.zero_()
        assert_same(read, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_gradient_of_many_rows(dtype):
    rows, k, n = 65536, 256, 384
    x = torch.randn(rows, k, device="cuda", dtype=dtype)
    for offset in (0, 0.125):
        dy = (torch.randn(rows, n, device="cuda") / 16 + offset).to(dtype)
        db = torch.ops.warpwright.linear_backward(dy, x, None, [False, True, True])[2].double()
        exact = dy.double().sum(0)
        theirs = (dy.sum(0).double() - exact).abs().max()
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        assert (db - exact).abs().max() <= 1.5 * theirs + ulp


@pytest.mark.gpu
def test_backward_is_the_first_that_its_thread_asks_of_cuda():
    # Autograd's thread has no context before, and memory from the cache makes none current.
    code = """
import torch, warpwright.functional as F
torch.empty(1 << 26, device="cuda")
x, w = (torch.ones(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
x.requires_grad_(), w.requires_grad_()
y = F.linear(x, w)
dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
assert (dx == 512).all() and (dw == 512).all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
def test_layouts_of_large_operands(dtype, tf32):
    # Column-major, strided and misaligned views of sizes that the sm_90a path takes if it can.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    x, weight, bias = operands("cuda", dtype, (512,), 520, 264, integers=True)
    exact = [
        t.to(dtype)
        for t in step(native, [t.detach().double().requires_grad_() for t in (x, weight, bias)])
    ]
    for _, x_view in layouts(x.detach()):
        for _, weight_view in layouts(weight.detach()):
            views = [t.detach().requires_grad_() for t in (x_view, weight_view, bias)]
            assert_same(step(F.linear, views), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [((2048,), 512, 2048), ((1000,), 520, 1032)], ids=str)
def test_float32_operands_along_either_direction(shape):
    x, weight, bias = operands("cuda", torch.float32, *shape, integers=True)
    exact = [
        t.float()
        for t in step(native, [t.detach().double().requires_grad_() for t in (x, weight, bias)])
    ]
    for x_view in (x, x.t().contiguous().t()):
        for weight_view in (weight, weight.t().contiguous().t()):
            views = [t.detach().requires_grad_() for t in (x_view, weight_view, bias)]
            assert_same(step(F.linear, views), exact)


def test_same_bits_every_time(device, dtype):
    inputs = operands(device, dtype, (96,), 1000, 40)
    assert_same(step(F.linear, inputs), step(F.linear, inputs))


@pytest.mark.parametrize("sizes", [(24, 40, 16), (9, 13, 7)])
def test_layouts(device, dtype, sizes):
    m, k, n = sizes
    x, weight, bias = operands(device, dtype, (m,), k, n)
    for _, x_view in layouts(x.detach()):
        for _, weight_view in layouts(weight.detach()):
            inputs = [t.detach().requires_grad_() for t in (x_view, weight_view, bias)]
            compare_with_native(F.linear, native, inputs)


def test_strided_batches(device, dtype):
    _, weight, bias = operands(device, dtype, (), 6, 5)
    base = torch.randn(4, 6, 3, 6, device=device).to(dtype)
    for x in (
        base.transpose(0, 2),
        base.permute(0, 2, 3, 1),
        base[:, ::2],
        base[:1].expand(3, -1, -1, -1),
        base[0, 0, 0].expand(7, 6),
        base[..., 0].transpose(1, 2),
    ):
        compare_with_native(F.linear, native, (x.detach().requires_grad_(), weight, bias))


def test_expanded_cotangent(device, dtype):
    # sum().backward() hands over a gradient of stride 0 everywhere.
    inputs = operands(device, dtype, (5, 3), 8, 4, integers=True)
    ours = torch.autograd.grad(F.linear(*inputs).sum(), inputs)
    assert_same(ours, torch.autograd.grad(native(*inputs).sum(), inputs))


def test_column_major_cotangent(device, dtype):
    inputs = operands(device, dtype, (24,), 16, 40, integers=True)
    cotangent = torch.randint(-2, 3, (40, 24), device=device).to(dtype).t()
    ours = torch.autograd.grad(F.linear(*inputs), inputs, cotangent)
    assert_same(ours, torch.autograd.grad(native(*inputs), inputs, cotangent))


@pytest.mark.parametrize("bias_shape", [(), (1,), (2, 3), (2, 1), (1, 3)])
def test_bias_that_broadcasts(device, bias_shape):
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weight = torch.randn(3, 4, device=device, requires_grad=True)
    bias = torch.randn(bias_shape, device=device, requires_grad=True)
    compare_with_native(F.linear, native, (x, weight, bias))
    with torch.inference_mode():
        torch.testing.assert_close(F.linear(x, weight, bias), native(x, weight, bias))


def test_vector_of_weights(device):
    weight = torch.randn(4, device=device, requires_grad=True)
    for batch in ((), (2,), (2, 3)):
        compare_with_native(
            F.linear, native, (torch.randn(*batch, 4, device=device, requires_grad=True), weight)
        )


@pytest.mark.parametrize("other", [torch.int32, torch.uint8, torch.complex64], ids=str)
def test_native_types(device, other):
    if device == "cuda" and not other.is_complex:
        with pytest.raises(NotImplementedError, match="not implemented"):
            F.linear(torch.ones(2, 3, device=device).to(other), torch.ones(4, 3).to(device, other))
        return
    inputs = [torch.randint(0, 4, s, device=device).to(other) for s in ((2, 3), (5, 3), (5,))]
    if other.is_complex:
        inputs = [(t + 1j * t.flip(0)).requires_grad_() for t in inputs]
        for ours, theirs in zip(step(F.linear, inputs), step(native, inputs), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(F.linear(*inputs), native(*inputs))


def test_special_values(device, dtype):
    x = torch.randn(20, 40, device=device).to(dtype)
    x[3, 5], x[4, 6], x[17, 39] = float("nan"), float("inf"), float("-inf")
    weight = torch.randn(24, 40, device=device).to(dtype)
    compare_with_native(F.linear, native, (x.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradients(device, needs):
    inputs = [
        torch.randn(s, device=device, dtype=torch.float64, requires_grad=need)
        for s, need in zip([(2, 3, 4), (5, 4), (5,)], needs, strict=True)
    ]
    gradcheck(F.linear, inputs)
    if not needs[2]:
        gradcheck(lambda x, w: F.linear(x, w), inputs[:2])


def test_gradients_of_complex_input(device):
    inputs = [
        torch.randn(s, device=device, dtype=torch.complex128, requires_grad=True)
        for s in ((3, 4), (2, 4), (2,))
    ]
    assert torch.autograd.gradcheck(F.linear, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(F.linear, inputs)


def test_only_needed_operands_are_kept(device):
    x = torch.randn(4, 3, device=device, requires_grad=True)
    weight = torch.randn(2, 3, device=device)
    output = F.linear(x, weight)  # keeps weight, but not x
    with torch.no_grad():
        x.zero_()
    output.sum().backward()
    assert_same(x.grad, weight.sum(0).expand(4, 3).contiguous())


def assert_func_transforms_agree(device, ours, theirs):
    """torch.func on two functions of an input, a weight and a bias."""
    f64 = {"device": device, "dtype": torch.float64}
    x, w, b = torch.randn(3, 4, **f64), torch.randn(5, 4, **f64), torch.randn(5, **f64)
    func = torch.func
    for transform in (
        lambda f: func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1, 2))(x, w, b),
        lambda f: func.vjp(f, x, w, b)[1](torch.ones(3, 5, **f64)),
        lambda f: func.jvp(f, (x, w, b), (x.cos(), w.cos(), b.cos())),
        lambda f: func.jvp(lambda t: f(x, t), (w,), (w.cos(),)),
        lambda f: func.jvp(lambda t: f(x, w, t), (b,), (b.cos(),)),
        lambda f: func.jacrev(f, argnums=(0, 1, 2))(x, w, b),
        lambda f: func.jacfwd(f, argnums=(0, 1, 2))(x, w, b),
        lambda f: func.vmap(f, in_dims=(0, None, None))(x, w, b),
        lambda f: func.vmap(lambda t: func.grad(lambda u: f(t, u).pow(2).sum())(w))(x),
        lambda f: func.hessian(lambda t: f(x, t, b).pow(3).sum())(w),
        lambda f: func.grad(lambda t: func.grad(lambda u: f(x, u, b).pow(2).sum())(t).sum())(w),
        lambda f: func.jvp(func.grad(lambda t: f(x, t, b).pow(2).sum()), (w,), (w.cos(),)),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


def test_func_transforms(device):
    assert_func_transforms_agree(device, F.linear, native)


def test_opcheck(device):
    ops = torch.ops.warpwright
    x, w, b = operands(device, torch.float32, (2, 3), 4, 5)
    dy = torch.randn(2, 3, 5, device=device, requires_grad=True)
    opcheck(ops.linear.default, (x, w, b))
    opcheck(ops.linear.default, (x, w))
    opcheck(ops.linear.default, (x[0, 0], w.detach(), b))
    opcheck(ops.linear.default, (x, w[0]))
    opcheck(ops.linear.default, (x, w, b[0]))
    opcheck(ops.linear.default, (x.transpose(0, 1), w.detach().t().contiguous().t(), b))
    for mask in subsets(3):
        opcheck(ops.linear_backward.default, (dy, x, w, mask))
    opcheck(ops.linear_backward.default, (dy, None, w, (True, False, True)))
    opcheck(ops.linear_backward.default, (dy, x, None, (False, True, False)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def run(x, w, b):
        return F.linear(torch.relu(F.linear(x, w, b)), w.t())

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (8, 13):
        inputs = operands(device, torch.float32, (m,), 6, 5)
        expected, actual = run(*inputs), compiled(*inputs)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
        )


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    inputs = operands(device, torch.float32, (6,), 8, 4, integers=True)
    with torch.autocast(device, dtype=low):
        ours, theirs = F.linear(*inputs), native(*inputs)
        assert F.linear(inputs[0].double(), inputs[1].double()).dtype == torch.float64
    assert ours.dtype == low
    assert_same(ours, theirs)
    assert_same(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs))


@pytest.mark.gpu
def test_tf32_follows_the_backend_setting():
    inputs = operands("cuda", torch.float32, (256,), 512, 256)
    exact = native(*[t.detach().double() for t in inputs])
    strict = (F.linear(*inputs).double() - exact).abs().max()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        compare_with_native(F.linear, native, inputs)
        rounded = (F.linear(*inputs).double() - exact).abs().max()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert rounded > 50 * strict


def test_bad_input(device):
    def t(*shape, **kwargs):
        return torch.ones(shape, device=device, **kwargs)

    cases = [
        (r"at least 1D, but they are 0D and 2D", (t(), t(3, 4))),
        (r"at least 1D, but they are 2D and 0D", (t(2, 4), t())),
        (r"weight: .*<= 2 dimensions.*3D", (t(2, 4), t(2, 3, 4))),
        (r"input: expected 4 features, got 5: mat1 and mat2 .*\(2x5 and 4x3\)", (t(2, 5), t(3, 4))),
        (r"expanded size of the tensor \(3\) must match", (t(2, 4), t(3, 4), t(4))),
        (r"weight: .*same dtype.*Double and Float", (t(2, 4, dtype=torch.float64), t(3, 4))),
        (r"bias: .*same dtype", (t(2, 4), t(3, 4), t(3, dtype=torch.float64))),
        (r"weight: Expected all tensors to be on the same device", (t(2, 4), t(3, 4).to("meta"))),
    ]
    for message, inputs in cases:
        with pytest.raises(RuntimeError, match=message):
            F.linear(*inputs)
    ops = torch.ops.warpwright
    with pytest.raises(RuntimeError, match=r"linear_backward: weight: expected a matrix"):
        ops.linear_backward(t(2, 3), None, None, (True, False, False))
    with pytest.raises(RuntimeError, match=r"linear_backward: input: expected leading sizes"):
        ops.linear_backward(t(2, 3), t(4, 5), None, (False, True, False))


def test_requires_grad_of_output(device):
    x, w, b = (t.detach() for t in operands(device, torch.float32, (2,), 3, 4))
    assert not F.linear(x, w, b).requires_grad
    assert F.linear(x, w, b.requires_grad_()).requires_grad
    with torch.no_grad():
        assert not F.linear(x, w, b).requires_grad
