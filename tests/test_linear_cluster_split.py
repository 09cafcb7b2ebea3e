"""linear's products of few output tiles and a long k, whose parts of k a thread-block cluster adds."""

import re

import pytest
import torch

import warpwright.functional as F
from warpwright import _C
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.linear
ops = torch.ops.warpwright

# (rows, in, out) -> (role, tile, CTAs of a cluster). Hardly an extent is a multiple of the tile, and
# most k end inside a k tile. Of the first, TMA cannot store the rows of D.
FORWARD, GRAD_INPUT, GRAD_WEIGHT = "forward", "grad_input", "grad_weight"
SIZES = {
    (96, 2744, 2335): (FORWARD, "128x64", 2),
    (110, 5000, 3000): (FORWARD, "128x64", 2),
    (87, 1992, 3160): (FORWARD, "128x64", 2),
    (96, 4096, 4096): (GRAD_INPUT, "128x64", 2),
    (91, 3000, 2744): (GRAD_INPUT, "128x64", 2),
    (2463, 1080, 1992): (GRAD_WEIGHT, "192x192", 2),
    (17678, 960, 1040): (GRAD_WEIGHT, "192x192", 4),
    (24186, 944, 576): (GRAD_WEIGHT, "192x192", 8),
    (8056, 2000, 464): (GRAD_WEIGHT, "128x128 ping-pong", 2),
    (8064, 2048, 512): (GRAD_WEIGHT, "128x128 ping-pong", 2),
}
LONGEST = (114685, 1520, 1264)  # without a bias, the gradient of the weight takes 128x256
SHORT = [sizes for sizes, (role, *_) in SIZES.items() if role != GRAD_WEIGHT]
LONG = [sizes for sizes, (role, *_) in SIZES.items() if role == GRAD_WEIGHT]
HALF = [torch.bfloat16, torch.float16]
half_types = pytest.mark.parametrize("half", HALF, ids=str)
all_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


# ---- the choice ----


def lines(sizes, dtype="bfloat16", gpu="h100", tf32=False, sm90=True, pad=0):
    rows, k, n = sizes
    x, w = _C.Operand([rows, k], [k + pad, 1], 0), _C.Operand([n, k], [k + pad, 1], 0)
    return dict(_C.explain_linear(dtype, tf32, x, w, _C.named_devices()[gpu], sm90))


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@all_sizes
def test_few_tiles_of_a_long_k_take_a_cluster(sizes, dtype, gpu):
    role, tile, ctas = SIZES[sizes]
    text = lines(sizes, dtype, gpu)[role]
    assert f"16-bit wgmma, tile {tile}, " in text
    assert f", split-k {ctas} in a cluster (few output tiles for the SMs: k is split" in text


def test_others_do_not():
    for sizes in SIZES:
        for others in (
            {"dtype": "float32", "tf32": True},
            {"dtype": "float32"},
            {"sm90": False},
            {"gpu": "a100"},
        ):
            assert "in a cluster" not in "".join(lines(sizes, **others).values())
    for sizes in ((4096, 4096, 4096), (16384, 768, 50304), (96, 64, 4096), (64, 128, 10)):
        assert "in a cluster" not in "".join(lines(sizes).values())
    # Rows that TMA cannot read are copied first, or realigned on the way.
    for sizes in SIZES:
        for text in lines(sizes, pad=1).values():
            assert not ("realigned" in text and "in a cluster" in text)


@all_sizes
def test_one_round(sizes):
    """All clusters are resident at once."""
    rows, k, n = sizes
    extents = {FORWARD: (rows, n), GRAD_INPUT: (rows, k), GRAD_WEIGHT: (n, k)}
    for role, text in lines(sizes).items():
        if (found := re.search(r"tile (\d+)x(\d+),.* split-k (\d) in a cluster", text)) is None:
            continue
        rows_of_tile, cols_of_tile, ctas = map(int, found.groups())
        m, n_of_role = extents[role]
        tiles = -(-m // rows_of_tile) * -(-n_of_role // cols_of_tile)
        assert tiles <= {2: 66, 4: 30, 8: 15}[ctas]


# ---- the kernel ----


def operands(sizes, dtype, integers=False):
    rows, k, n = sizes
    return [
        (torch.randint(-3, 4, s, device="cuda") if integers else torch.randn(s, device="cuda"))
        .to(dtype)
        .requires_grad_()
        for s in ((rows, k), (n, k), (n,))
    ]


def step(function, inputs):
    """Output and all gradients, from a cotangent of small integers."""
    y = function(*inputs)
    dy = (torch.arange(y.numel(), device="cuda") % 5 - 2).to(y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.gpu
@half_types
@all_sizes
def test_values(sizes, half):
    compare_with_native(F.linear, native, operands(sizes, half))


@pytest.mark.gpu
@half_types
@all_sizes
def test_integers_are_exact_and_the_bits_repeat(sizes, half):
    inputs = operands(sizes, half, integers=True)
    found = step(F.linear, inputs)
    exact = step(native, [t.detach().double().requires_grad_() for t in inputs])
    # A sum of one product may be -0.
    assert_same([t + 0 for t in found], [t.to(half) + 0 for t in exact])
    noise = operands(sizes, half)
    first = step(F.linear, noise)
    for _ in range(20):
        assert_same(step(F.linear, noise), first)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("sizes", SHORT, ids=str)
def test_activations(sizes, activation):
    """With gradients gelu and silu also store the pre-activation."""
    ours = getattr(F, f"linear_{activation}")
    theirs = getattr(torch.nn.functional, activation)
    inputs = operands(sizes, torch.bfloat16)
    with torch.no_grad():
        plain = ours(*inputs)
    output = ours(*inputs)
    assert_same(output.detach(), plain)
    single = theirs(native(*(t.detach().float() for t in inputs)))
    assert (output - single).norm() <= 4e-3 * single.norm()
    # As after two ops: the product in float32, then one rounding of each.
    z = F.linear(*inputs)
    assert (output - theirs(z)).norm() <= 8e-3 * single.norm()
    if activation != "relu":  # whose gradient is that of our own output's signs
        dy = torch.randn_like(output)
        mine = torch.autograd.grad(output, inputs, dy)
        wide = [t.detach().float().requires_grad_() for t in inputs]
        wanted = torch.autograd.grad(theirs(native(*wide)), wide, dy.float())
        for grad, value in zip(mine, wanted, strict=True):
            assert (grad - value).norm() <= 1e-2 * value.norm()


@pytest.mark.gpu
@half_types
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", LONG, ids=str)
def test_gradients_in_float32(sizes, transposed, half):
    """D in float32, dense or as the transpose of a dense matrix, with and without row sums."""
    rows, k, n = sizes
    x = torch.randn(rows, k, device="cuda").to(half)
    dy = torch.randn(rows, n, device="cuda").to(half)
    w = torch.randn(k, n, device="cuda").to(half).t()
    w = w if transposed else w.contiguous()
    wanted = dy.double().t() @ x.double(), dy.double().sum(0)
    for mask in ((False, True, True), (False, True, False)):
        grads = ops.linear_backward(dy, x, w, mask, (True,) * 3)[1:]
        again = ops.linear_backward(dy, x, w, mask, (True,) * 3)[1:]
        for grad, repeat, value in zip(grads, again, wanted, strict=True):
            if grad is None:
                continue
            assert grad.dtype == torch.float32
            assert (grad - value).norm() <= 1e-4 * value.norm()  # tensor cores truncate
            assert_same(grad, repeat)
        assert grads[0].stride() == w.stride()


@pytest.mark.gpu
@half_types
def test_the_largest_tile(half):
    x, w, _ = operands(LONGEST, half, integers=True)
    dy = torch.randint(-1, 2, (LONGEST[0], LONGEST[2]), device="cuda").to(half)
    (found,) = torch.autograd.grad(F.linear(x, w), w, dy)
    assert_same(found + 0, (dy.double().t() @ x.detach().double()).to(half) + 0)
    noise = torch.randn_like(x).requires_grad_()
    first, *others = (torch.autograd.grad(F.linear(noise, w), w, dy)[0] for _ in range(10))
    for other in others:
        assert_same(other, first)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SHORT[0], SHORT[-1], LONG[0], LONG[2], LONG[-1]], ids=str)
def test_many_in_a_row(sizes):
    """Kernels that overlap with the next one, without a synchronisation between them."""
    inputs = operands(sizes, torch.bfloat16)
    first = step(F.linear, inputs)
    results = [step(F.linear, inputs) for _ in range(8)]
    for result in results:
        assert_same(result, first)
