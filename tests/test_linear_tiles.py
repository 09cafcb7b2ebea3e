"""linear is exact on every tile of the GPU's kernels and on every path, and repeats its bits."""

import itertools
import re
import subprocess
import sys

import pytest
import torch
from common import layouts
from linear_cases import CUDA_SHAPES, operands, step, unsigned_zeros

import warpwright.functional as F
from warpwright import _C
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.linear


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_values_of_every_tile(dtype, shape):
    compare_with_native(F.linear, native, operands("cuda", dtype, *shape))


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
