"""set_float32_matmul_precision: what linear and its kin make of float32 at each level."""

import re
import threading

import pytest
import torch
from linear_cases import CUDA_SHAPES, operands, step, unsigned_zeros

import warpwright
import warpwright.functional as F
from warpwright import _C
from warpwright.testing import assert_same, to_double

ROLES = ("forward", "grad_input", "grad_weight")
native = torch.nn.functional


def at(level, function, *args):
    before = warpwright.get_float32_matmul_precision()
    warpwright.set_float32_matmul_precision(level)
    try:
        return function(*args)
    finally:
        warpwright.set_float32_matmul_precision(before)


# ---- the setting ----


def test_levels():
    assert warpwright.get_float32_matmul_precision() is None
    for level in ("highest", "high", "medium", None):
        warpwright.set_float32_matmul_precision(level)
        assert warpwright.get_float32_matmul_precision() == level
    torch.set_float32_matmul_precision("highest")
    warpwright.set_float32_matmul_precision("high")
    assert torch.get_float32_matmul_precision() == "highest"


def test_holds_for_all_threads():
    warpwright.set_float32_matmul_precision("high")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(warpwright.get_float32_matmul_precision()))
    thread.start()
    thread.join()
    assert seen == ["high"]


@pytest.mark.parametrize("value", ["tf32", "High", "", 1, True, ["high"], torch.float32])
def test_wrong_level(value):
    message = re.escape(f"precision: expected 'highest', 'high', 'medium' or None, got {value!r}")
    warpwright.set_float32_matmul_precision("medium")
    with pytest.raises(ValueError, match=message):
        warpwright.set_float32_matmul_precision(value)
    assert warpwright.get_float32_matmul_precision() == "medium"


def test_cpu_stays_as_it_is():
    inputs = operands("cpu", torch.float32, (65,), 72, 136)
    expected = step(F.linear, inputs)
    for level in ("highest", "high", "medium"):
        assert_same(at(level, step, F.linear, inputs), expected)


# ---- the choice ----


def lines(m, n, k, dtype="float32", tf32=False, split=True, arch=90, sm90=True):
    gpu = _C.DeviceInfo()
    gpu.sm_arch = arch
    x, w = _C.Operand([m, k], [k, 1], 0), _C.Operand([n, k], [k, 1], 0)
    return dict(_C.explain_linear(dtype, tf32, x, w, gpu, sm90, split))


def test_split_products_take_wgmma():
    for role in ROLES:
        assert "sm_90a 3xTF32 wgmma, tile 128x128, 4 stages" in lines(4096, 4096, 4096)[role]
        assert "sm_90a TF32 wgmma" in lines(4096, 4096, 4096, tf32=True)[role]
        assert "fp32 FMA" in lines(4096, 4096, 4096, split=False)[role]
    assert "A k-major, B k-major" in lines(4096, 4096, 4096)["forward"]
    assert "A k-major, B n-major" in lines(4096, 4096, 4096)["grad_input"]
    assert "A m-major, B n-major" in lines(4096, 4096, 4096)["grad_weight"]
    assert "split-k" in lines(512, 128, 3136)["forward"]
    for dtype in ("bfloat16", "float16", "float64"):
        assert lines(4096, 4096, 4096, dtype) == lines(4096, 4096, 4096, dtype, split=False)


def test_what_has_no_split_kernel_stays_float32():
    for role in ROLES:
        assert "fp32 FMA" in lines(4096, 4096, 4096, arch=80)[role]
        assert "fp32 FMA" in lines(4096, 4096, 4096, arch=100)[role]
        assert "(no sm_90a)" in lines(4096, 4096, 4096, sm90=False)[role]
        assert "fp32 FMA" in lines(4095, 4095, 4095)[role]
        assert "(an operand's rows are not multiples of 16 bytes)" in lines(4095, 4095, 4095)[role]
    assert "few rows, fp32 FMA" in lines(1, 4096, 4096)["forward"]
    x, w = _C.Operand([4096] * 2, [1, 4096], 0), _C.Operand([4096] * 2, [4096, 1], 0)
    found = dict(_C.explain_linear("float32", False, x, w, _C.DeviceInfo(), True, True))
    assert "fp32 FMA" in found["forward"]


def test_explain_follows_the_setting(monkeypatch):
    monkeypatch.delenv("WARPWRIGHT_PATH", raising=False)
    x, w = torch.empty(4096, 1024, device="meta"), torch.empty(1024, 1024, device="meta")
    target = torch.empty(4096, dtype=torch.int64, device="meta")
    for function, args in (
        ("linear", (x, w)),
        ("linear_gelu", (x, w)),
        ("mlp", (x, w, None, w)),
        ("linear_cross_entropy", (x, w, target)),
    ):
        text = {
            level: at(level, lambda f, a: warpwright.explain(f, *a, device="cuda"), function, args)
            for level in (None, "highest", "high", "medium")
        }
        assert "3xTF32 wgmma" in text["high"]
        assert " TF32 wgmma" in text["medium"]
        assert "wgmma" not in text["highest"]
        assert text[None] == text["highest"]
        torch.backends.cuda.matmul.allow_tf32 = True
        for level, other in ((None, "medium"), ("highest", "highest"), ("high", "high")):
            found = at(level, lambda f, a: warpwright.explain(f, *a, device="cuda"), function, args)
            assert found == text[other]
        torch.backends.cuda.matmul.allow_tf32 = False


def test_the_shapes_reach_every_split_product():
    found = set()
    for batch, k, n in CUDA_SHAPES:
        if len(batch) == 1:
            for role, text in lines(batch[0], n, k).items():
                found.add((role, "3xTF32" in text, "split-k" in text))
    for role in ROLES:
        assert {(role, True, False), (role, True, True), (role, False, False)} <= found


# ---- on a GPU ----


def relative(value, exact):
    """The root mean square of the error over that of the result."""
    error, scale = (t.square().mean().sqrt() for t in (value.detach().double() - exact, exact))
    return float(error / scale) if scale > 0 else float(error)


def assert_nearly_float32(ours, exact, native_value, what):
    """Some times native's error, or a hundredth of TF32's 2.9e-4 and less."""
    error, native_error = relative(ours, exact), relative(native_value, exact)
    assert error <= max(4 * native_error, 1e-6), f"{what}: {error:.2e}, native {native_error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_split_values(shape):
    inputs = operands("cuda", torch.float32, *shape)
    exact = step(native.linear, to_double(inputs))
    theirs = step(native.linear, inputs)
    found = at("high", step, F.linear, inputs)
    for i, (a, e, b) in enumerate(zip(found, exact, theirs, strict=True)):
        assert_nearly_float32(a, e, b, f"result {i}")


@pytest.mark.gpu
def test_split_values_of_one_sign():
    # Nothing cancels: where every sum is cut, all of the errors have the same sign.
    inputs = [
        t.detach().abs().requires_grad_()
        for t in operands("cuda", torch.float32, (2048,), 4096, 1024)
    ]
    exact = step(native.linear, to_double(inputs))[0]
    found = at("high", step, F.linear, inputs)[0]
    assert relative(found, exact) <= 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_split_integers_are_exact(shape):
    inputs = operands("cuda", torch.float32, *shape, integers=True)
    exact = [t.float() for t in step(native.linear, to_double(inputs))]
    warpwright.set_float32_matmul_precision("high")
    assert_same(*map(unsigned_zeros, (step(F.linear, inputs), exact)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=str)
def test_split_results_repeat(shape, monkeypatch):
    inputs = operands("cuda", torch.float32, *shape)
    warpwright.set_float32_matmul_precision("high")
    first = step(F.linear, inputs)
    for _ in range(3):
        assert_same(step(F.linear, inputs), first)
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    assert_same(step(F.linear, inputs), at("highest", step, F.linear, inputs))


SPECIALS = [float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 0.0]
# One of them in a sum, whose order then does not decide whether it overflows.
HUGE = [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]


def with_specials(tensor, values):
    """A copy with each of them in two rows and columns of their own."""
    copy = tensor.detach().clone()
    for i, value in enumerate(values * 2):
        copy[(i * 11 + 5) % copy.shape[0], (i * 7 + 3) % copy.shape[1]] = value
    return copy


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [((512,), 3136, 128), ((1000,), 520, 1032), ((200,), 264, 640)], ids=str
)
@pytest.mark.parametrize("where", ["input", "weight", "both", "huge"])
def test_infinities_and_nan(shape, where):
    x, weight, bias = operands("cuda", torch.float32, *shape)
    cotangent = torch.randn(shape[0][0], shape[2], device="cuda")
    if where == "huge":  # alone: with an infinity, the order decides whether their sum is NaN
        x = with_specials(x, HUGE).requires_grad_()
    else:
        cotangent = with_specials(cotangent, SPECIALS)
    if where in ("input", "both"):
        x = with_specials(x, SPECIALS).requires_grad_()
    if where in ("weight", "both"):
        weight = with_specials(weight, SPECIALS).requires_grad_()

    def run():
        y = F.linear(x, weight, bias)
        return y, *torch.autograd.grad(y, (x, weight), cotangent)

    for ours, exact in zip(at("high", run), at("highest", run), strict=True):
        kind = [t.isposinf() * 1 + t.isneginf() * 2 + t.isnan() * 3 for t in (ours, exact)]
        assert torch.equal(*kind)
        finite = exact.isfinite()
        assert finite.any()
        assert not finite.all() or where == "huge"
        # Rows with a huge element apart: their scale is another.
        ordinary = finite & (exact.abs() < 1e6)
        assert (ours - exact)[ordinary].abs().max() <= 1e-5 * exact[ordinary].abs().max()


@pytest.mark.gpu
def test_levels_on_cuda():
    inputs = operands("cuda", torch.float32, (512,), 1024, 1024)
    plain = step(F.linear, inputs)
    torch.backends.cuda.matmul.allow_tf32 = True
    tf32 = step(F.linear, inputs)
    assert not torch.equal(plain[0], tf32[0])
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert_same(at("highest", step, F.linear, inputs), plain)
        assert_same(at("medium", step, F.linear, inputs), tf32)
        assert_same(at(None, step, F.linear, inputs), tf32 if allowed else plain)
    split = at("high", step, F.linear, inputs)
    exact = step(native.linear, to_double(inputs))
    for a, b, e in zip(split, tf32, exact, strict=True):
        if a.dim() == 2:  # no product in the gradient of the bias
            assert not torch.equal(a, b)
            assert relative(a, e) < relative(b, e) / 50


@pytest.mark.gpu
def test_what_is_built_on_linear():
    x, w1, b1 = operands("cuda", torch.float32, (2048,), 512, 2048)
    w2, b2 = (t / 32 for t in operands("cuda", torch.float32, (1,), 2048, 520)[1:])
    w1 = (w1.detach() / 16).requires_grad_()
    w2, b2 = (t.detach().requires_grad_() for t in (w2, b2))
    labels = torch.randint(2048, (2048,), device="cuda")
    for ours, theirs, inputs in (
        (F.linear_relu, lambda x, w, b: native.linear(x, w, b).relu(), (x, w1, b1)),
        (F.linear_gelu, lambda x, w, b: native.gelu(native.linear(x, w, b)), (x, w1, b1)),
        (F.linear_silu, lambda x, w, b: native.silu(native.linear(x, w, b)), (x, w1, b1)),
        (
            F.mlp,
            lambda x, w, b, v, c: native.linear(native.gelu(native.linear(x, w, b)), v, c),
            (x, w1, b1, w2, b2),
        ),
        (
            lambda x, w, b: F.linear_cross_entropy(x, w, labels, b),
            lambda x, w, b: native.cross_entropy(native.linear(x, w, b), labels),
            (x, w1, b1),
        ),
    ):
        if ours is F.linear_relu:  # its gradients jump where a sign is another
            exact, found = theirs(*to_double(inputs)).detach(), at("high", ours, *inputs)
            assert relative(found.detach(), exact) <= 3e-6
            continue

        def all_results(function, tensors):
            y = function(*tensors)
            return [y.detach(), *torch.autograd.grad(y.sum(), tensors)]

        exact = all_results(theirs, to_double(inputs))
        for a, e in zip(at("high", all_results, ours, inputs), exact, strict=True):
            assert relative(a, e) <= 1e-5


@pytest.mark.gpu
def test_split_products_in_a_graph():
    x, w, b = (t.detach() for t in operands("cuda", torch.float32, (1024,), 512, 1024))
    warpwright.set_float32_matmul_precision("high")
    expected = F.linear(x, w, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = F.linear(x, w, b)
    warpwright.set_float32_matmul_precision(None)
    graph.replay()
    assert_same(y, expected)
