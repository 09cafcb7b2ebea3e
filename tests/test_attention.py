import itertools
from contextlib import nullcontext

import pytest
import torch
from common import captured, gradcheck, opcheck, subsets
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native


def native(query, key, value, mask=None, **kwargs):
    # Native's fused CPU kernel issues AMX instructions for 16-bit types wherever the CPU lists
    # them, and dies where the system does not allow them. On CUDA the fused backends refuse some
    # masks, read others at misaligned addresses and give NaN for logits far from 0; they check the
    # head dimension, not strides and addresses, and find "no kernel to launch" for float32.
    attention = torch.nn.functional.scaled_dot_product_attention
    if query.device.type == "cpu":
        by_formula = query.dtype in (torch.bfloat16, torch.float16)
    else:
        strict = query.dtype == torch.float32 and not all(map(aligned, (query, key, value)))
        by_formula = mask is not None or strict
    with sdpa_kernel(SDPBackend.MATH) if by_formula else nullcontext():
        return attention(query, key, value, mask, **kwargs)


def aligned(x):
    """Every row of the last dimension starts at a multiple of 16 bytes and has no gaps."""
    offsets = (x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(n * x.element_size() % 16 == 0 for n in offsets)


ours = F.scaled_dot_product_attention


def contiguous(function):
    """Native's backends differ in memory order; test_strides compares it, the others values."""

    def run(*args, **kwargs):
        return function(*args, **kwargs).clone(memory_format=torch.contiguous_format)

    return run


def compare(inputs, **kwargs):
    if inputs[0].dtype == torch.float64:  # native is the oracle: there is no error of its own
        leaves = [t for t in inputs if t.requires_grad]
        results = [f(*inputs, **kwargs) for f in (ours, native)]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        if leaves:
            grads = [torch.autograd.grad(y, leaves, results[1].detach().cos()) for y in results]
            torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)
        return
    # The largest error of one draw scatters: test_errors_over_draws has the strict factor.
    compare_with_native(contiguous(ours), contiguous(native), inputs, kwargs, factor=3)


def make(device, dtype, *shape):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def qkv(device, dtype, B=2, H=4, S_q=5, S_k=7, D=8, D_v=None, H_kv=None):
    H_kv = H_kv or H
    return (
        make(device, dtype, B, H, S_q, D),
        make(device, dtype, B, H_kv, S_k, D),
        make(device, dtype, B, H_kv, S_k, D_v or D),
    )


# One key, one query, tails of every tile side (16, 64, 96, 128, 192, 512), both orders of S_q and S_k.
LENGTHS = [(1, 1), (1, 9), (9, 1), (3, 17), (64, 64), (65, 130), (129, 63), (200, 600), (600, 200)]
LENGTHS += [(192, 96), (193, 97), (383, 385)]
# Odd sizes below, at and above the padded 64/128/256, and one that no tile holds.
HEAD_DIMS = [(1, 1), (7, 7), (64, 64), (72, 40), (40, 72), (128, 128), (130, 130), (320, 320)]
HEAD_DIMS += [(192, 128), (256, 256)]


@pytest.mark.parametrize(("S_q", "S_k"), LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(device, dtype, S_q, S_k, is_causal):
    q, k, v = qkv(device, dtype, 1, 2, S_q, S_k, 32)
    if S_k == 1 or (is_causal and S_q == 1):
        # One visible key: the exact gradients are 0, and rounding is all there would be.
        q.requires_grad_(dtype == torch.float64)
        k.requires_grad_(q.requires_grad)
    compare((q, k, v), is_causal=is_causal)


@pytest.mark.parametrize(("D", "D_v"), HEAD_DIMS)
def test_head_dims(device, dtype, D, D_v):
    compare(qkv(device, dtype, 1, 2, 70, 90, D, D_v))
    compare(qkv(device, dtype, 1, 2, 70, 90, D, D_v), is_causal=True, scale=0.3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_errors_over_draws(device, dtype, is_causal):
    """Output and gradients: relative error against float64, mean over draws, <= 1.5 x native's."""
    sums = torch.zeros(2, 4)
    for _ in range(12):
        inputs = qkv(device, dtype, 1, 2, 70, 90, 32)
        wide = [t.detach().double().requires_grad_() for t in inputs]
        g = torch.randn(1, 2, 70, 32, device=device).to(dtype)

        def run(function, args):
            out = function(*args, is_causal=is_causal)
            return out, *torch.autograd.grad(out, args, g.to(out.dtype))  # noqa: B023

        exact = run(native, wide)
        for row, function in enumerate((ours, native)):
            for column, (x, e) in enumerate(zip(run(function, inputs), exact, strict=True)):
                sums[row, column] += float((x - e).abs().max() / e.abs().max())
    ulp = torch.finfo(dtype).eps * (16 if dtype == torch.float64 else 0)
    assert (sums[0] / 12 <= 1.5 * sums[1] / 12 + ulp).all(), sums / 12


MASK_SHAPES = [
    (70, 90),
    (1, 90),
    (70, 1),
    (1, 1),
    (3, 70, 90),
    (2, 3, 70, 90),
    (2, 1, 1, 90),
    (1, 3, 70, 1),
    (2, 1, 70, 90),
]


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_masks(device, dtype, shape):
    q, k, v = qkv(device, dtype, 2, 3, 70, 90, 16)
    mask = make(device, dtype, *shape)
    if shape[-1] == 1 and dtype != torch.float64:
        # A constant along the row changes nothing: the exact gradient is 0, the rest is rounding.
        mask.requires_grad_(False)
    compare((q, k, v, mask))
    compare((q, k, v, torch.rand(shape, device=device) < 0.7))
    if dtype in (torch.bfloat16, torch.float16):
        compare((q, k, v, torch.randn(shape, device=device)))


def test_mask_strides(device):
    q, k, v = qkv(device, torch.float32, 2, 3, 20, 30, 16)
    wide = torch.randn(30, 40, device=device)
    for mask in (
        torch.randn(30, 20, device=device).mT,
        wide[:20, 1:31],
        wide[5:25, ::1][:, 10:],
        torch.randn(1, 1, 1, 30, device=device).expand(2, 3, 20, 30),
    ):
        compare((q, k, v, mask))


def test_causal_with_mask(device):
    """Both at once, as native's fused CPU kernel: hidden by either."""
    q, k, v = qkv(device, torch.float32, 2, 3, 70, 90, 16)
    mask = torch.randn(70, 90, device=device)
    hidden = torch.ones(70, 90, dtype=torch.bool, device=device).triu(1)
    combined = native(q, k, v, mask.masked_fill(hidden, float("-inf")))
    torch.testing.assert_close(ours(q, k, v, mask, is_causal=True), combined)


def test_fully_masked_rows(device, dtype):
    for as_float in (False, True):
        q, k, v = qkv(device, dtype, 2, 2, 70, 90, 16)
        mask = torch.rand(70, 90, device=device) < 0.5
        mask[[0, 3, 69]] = False
        if as_float:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
        out = ours(q, k, v, mask)
        grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert (out[:, :, [0, 3, 69]] == 0).all()
        assert (grads[0][:, :, [0, 3, 69]] == 0).all()
        assert all(g.isfinite().all() for g in grads)
        compare((q, k, v, mask))


@pytest.mark.parametrize("offset", [-120.0, 120.0])
@pytest.mark.parametrize("S", [64, 192, 100])
def test_logit_offset(device, dtype, offset, S):
    """Rows whose log-sum-exp is far from 0, with padded key columns: no NaN in any gradient."""
    q, k, v = qkv(device, dtype, 1, 2, S, S, 64)
    mask = torch.full((S, S), offset, device=device, dtype=dtype)
    out = ours(q, k, v, mask)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(t.isfinite().all() for t in (out, *grads))
    compare((q, k, v, mask))


def test_exact_values(device, dtype):
    """Where the probabilities are exact, so is the result, bit for bit."""
    S, D = 64, 64
    v = torch.randint(-8, 8, (1, 2, S, D), device=device).to(dtype)
    zero = torch.zeros(1, 2, S, D, device=device, dtype=dtype)
    mean = v.double().mean(2, keepdim=True).expand(1, 2, S, D)
    assert_same(ours(zero, zero, v), mean.to(dtype).contiguous())
    one_hot = torch.eye(S, device=device).to(dtype).expand(1, 2, S, D)
    assert_same(ours(one_hot, one_hot, v, scale=1000.0), v)


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(device, dtype, is_causal):
    for H, H_kv in ((4, 2), (4, 1), (3, 3)):
        q, k, v = qkv(device, dtype, 2, H, 70, 90, 16, H_kv=H_kv)
        compare((q, k, v), enable_gqa=True, is_causal=is_causal)
    q, k, v = qkv(device, dtype, 2, 6, 20, 30, 16, H_kv=3)
    compare((q, k, v[:, :2].detach().requires_grad_()), enable_gqa=True)
    compare((q[0], k[0], v[0]), enable_gqa=True)
    compare((q[None], k[None], v[None]), enable_gqa=True)


def test_broadcasting(device):
    def t(*shape):
        return make(device, torch.float32, *shape)

    compare((t(5, 8), t(7, 8), t(7, 9)))
    compare((t(3, 5, 8), t(3, 7, 8), t(3, 7, 9)))
    compare((t(2, 1, 5, 8), t(1, 3, 7, 8), t(1, 1, 7, 8)))
    compare((t(2, 3, 5, 8), t(1, 1, 7, 8), t(7, 8)))
    compare((t(3, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8)))
    compare((t(2, 1, 3, 5, 8), t(2, 2, 3, 7, 8), t(1, 2, 3, 7, 8), t(2, 1, 3, 1, 7)))
    compare((t(2, 2, 3, 5, 8), t(2, 2, 3, 7, 8), t(1, 2, 3, 7, 8), t(5, 7)))
    compare((t(3, 5, 8), t(3, 7, 8), t(3, 7, 8), t(3, 1, 7)))


def test_empty(device, dtype):
    for B, H, S_q, S_k in ((0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0)):
        q, k, v = qkv(device, dtype, B, H, S_q, S_k)
        out = ours(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert out.shape == (B, H, S_q, 8)
        assert (out == 0).all()
        assert all((g == 0).all() for g in grads)
    q, k, v = qkv(device, dtype, 2, 0, 5, 7)  # native dies of a division by zero here
    assert ours(q, k, v).shape == (2, 0, 5, 8)
    q, k, v = qkv(device, torch.float32, 2, 2, 5, 7)
    compare((q[..., :0], k[..., :0], v))
    assert ours(q, k, v[..., :0]).shape == (2, 2, 5, 0)


def test_layouts(device, dtype):
    for D in (64, 20):
        fused = make(device, dtype, 2, 9, 3, 4, D)  # (B, S, 3, H, D)
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
        compare((q, k, v))
        base = torch.randn(2, 4, 9, D + 3, device=device).to(dtype)
        for view in (base[..., 1 : D + 1], base[..., 3:], base[:, :, ::2, :D], base[:, ::2, :, :D]):
            compare((view, view, view))
        flipped = torch.randn(2, 4, D, 9, device=device).to(dtype).mT
        compare((flipped, flipped, flipped))
        row = torch.randn(1, 1, 1, D, device=device).to(dtype).expand(2, 4, 9, D)
        compare((row, row, row))


def test_strides(device):
    """Output and gradients in the memory order of their inputs."""
    x = torch.randn(2, 9, 4, 16, device=device).transpose(1, 2)
    for view in (x, x.contiguous()):
        leaves = [view.detach().requires_grad_() for _ in range(3)]
        out = ours(*leaves)
        assert out.stride() == view.stride()
        if device == "cpu":  # native's CUDA backends differ among themselves
            assert out.stride() == native(*leaves).stride()
        for grad in torch.autograd.grad(out.sum(), leaves):
            assert grad.stride() == view.stride()
    if device == "cpu":
        for y in (
            x.permute(2, 1, 0, 3),
            x.transpose(0, 1),
            x[:1].expand(3, -1, -1, -1),
            x[..., :8],
        ):
            assert ours(y, y, y).stride() == native(y, y, y).stride()


def test_non_finite(device):
    q, k, v = (t.detach() for t in qkv(device, torch.float32, 1, 1, 5, 7))
    for position, value in itertools.product(range(3), (float("nan"), float("inf"))):
        args = [q.clone(), k.clone(), v.clone()]
        args[position][0, 0, 1, 2] = value
        # The formula: native's kernels differ (a NaN query becomes 0, a hidden key's NaN shows).
        scores = args[0] @ args[1].mT
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        assert torch.equal(ours(*args).isnan(), (scores.softmax(-1) @ args[2]).isnan())
        if position == 1:
            visible = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            assert torch.equal(ours(*args, is_causal=True).isnan(), (visible @ args[2]).isnan())
    for value in (float("nan"), float("inf")):
        mask = torch.zeros(5, 7, device=device)
        mask[1, 2] = value
        assert torch.equal(ours(q, k, v, mask).isnan(), native(q, k, v, mask).isnan())
    args = [x.clone().requires_grad_() for x in (q, k, v)]
    args[0].data[0, 0, 1, 2] = float("nan")
    grad_q, grad_k, _ = torch.autograd.grad(ours(*args).sum(), args)
    assert grad_q[0, 0, 1].isnan().all()
    assert grad_q[0, 0, 0].isfinite().all()
    assert grad_k.isnan().all()


def test_many_heads(device):
    """More than 65535 of everything that a launch may put on the grid."""
    q, k, v = qkv(device, torch.float32, 300, 250, 2, 3, 4)
    compare((q, k, v))
    compare(qkv(device, torch.float32, 70000, 1, 1, 2, 4))


def test_repeatable(device, dtype):
    q, k, v = qkv(device, dtype, 2, 4, 200, 300, 64, H_kv=2)
    mask = make(device, dtype, 1, 4, 200, 300)

    def run():
        out = ours(q, k, v, mask, enable_gqa=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, mask))

    first = run()
    for _ in range(5):
        assert_same(run(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("S_q", "D"), [(1000, 64), (2100, 64), (1000, 128), (1000, 256)])
def test_more_tiles_than_ctas(S_q, D, is_causal):
    """Persistent kernels take several tiles per CTA, under the causal rule in a changing order."""
    q, k, v = qkv("cuda", torch.bfloat16, 3, 24, S_q, 900, D, H_kv=8)
    compare((q, k, v), is_causal=is_causal, enable_gqa=True)

    def run():
        out = ours(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    first = run()
    for _ in range(20):
        assert_same(run(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("needs", subsets(3), ids=lambda n: "".join("01"[b] for b in n))
def test_some_gradients_of_16_bits(needs):
    """Each kernel of the backward runs alone, too."""
    inputs = [
        x.detach().requires_grad_(n)
        for x, n in zip(qkv("cuda", torch.float16, 1, 4, 300, 200, 64, H_kv=2), needs, strict=True)
    ]
    compare(inputs, is_causal=True, enable_gqa=True)


@pytest.mark.gpu
def test_infinite_key_that_nobody_sees():
    q, k, v = qkv("cuda", torch.bfloat16, 1, 2, 70, 100, 64)
    k.data[:, :, 90, 3] = float("inf")
    grads = torch.autograd.grad(ours(q, k, v, is_causal=True).square().sum(), (q, k, v))
    for grad in grads[1:]:  # that of q has 0 times infinity, in native, too
        assert grad.isfinite().all()
    assert not grads[1][:, :, 70:].any()
    assert not grads[2][:, :, 70:].any()


def seeded(seed, function):
    def run(*args, **kwargs):
        torch.manual_seed(seed)
        return function(*args, **kwargs)

    return run


def test_dropout_replay(device, dtype):
    q, k, v = qkv(device, dtype, 2, 3, 70, 90, 16)

    def run(seed):
        out = seeded(seed, ours)(q, k, v, dropout_p=0.3)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    assert_same(run(1), run(1))
    assert not torch.equal(run(1)[0], run(2)[0])
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    first = ours(q, k, v, dropout_p=0.3)
    assert not torch.equal(first, ours(q, k, v, dropout_p=0.3))
    (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)
    assert torch.equal(first, ours(q, k, v, dropout_p=0.3))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_statistics(device, dtype, p):
    """With v = identity the output is the dropped probabilities themselves."""
    S = 128
    q = torch.zeros(4, 8, S, S, device=device, dtype=dtype)
    eye = torch.eye(S, device=device).to(dtype).expand(4, 8, S, S)
    factors = ours(q, q, eye, dropout_p=p).double() * S
    keep = factors != 0
    n = keep.numel()
    tolerance = 5 * (p * (1 - p) / n) ** 0.5
    assert abs(keep.double().mean() - (1 - p)) < tolerance
    torch.testing.assert_close(
        factors[keep], torch.full_like(factors[keep], 1 / (1 - p)), rtol=1e-2, atol=0
    )
    # Neither rows, columns, neighbours in a draw's square nor heads are correlated.
    for a, b in (
        (keep[:, :, 1:], keep[:, :, :-1]),
        (keep[..., 1:], keep[..., :-1]),
        (keep[:, :, 8:], keep[:, :, :-8]),
        (keep[..., 8:], keep[..., :-8]),
        (keep[:, 1:], keep[:, :-1]),
        (keep[1:], keep[:-1]),
    ):
        covariance = (a.double() * b.double()).mean() - a.double().mean() * b.double().mean()
        assert abs(covariance) < 6 * p * (1 - p) / a.numel() ** 0.5


def test_dropout_against_factors(device):
    """Out and gradients against the plain formula with the factors that the call drew."""
    q, k, v = qkv(device, torch.float64, 2, 3, 70, 90, 16)
    ops = torch.ops.warpwright
    out, lse, state = ops.attention(q, k, v, None, 0.3, True, None)
    factors = ops.attention_dropout_factors(state, torch.float64, 0.3, 2, 3, 0, 70, 90)
    for begin, rows in ((0, 16), (5, 40), (69, 1)):
        block = ops.attention_dropout_factors(state, torch.float64, 0.3, 2, 3, begin, rows, 90)
        assert torch.equal(block, factors[:, :, begin : begin + rows])
    scores = (q @ k.mT) / 4
    scores = scores.masked_fill(torch.ones(70, 90, device=device).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) * factors) @ v
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    g = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g)
    )


def test_dropout_extremes(device, dtype):
    q, k, v = qkv(device, dtype, 1, 2, 20, 30, 16)
    out = ours(q, k, v, dropout_p=1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    assert_same(ours(q, k, v, dropout_p=0.0), ours(q, k, v))


SMALL = {"B": 1, "H": 2, "S_q": 3, "S_k": 4, "D": 2, "D_v": 3}


@pytest.mark.parametrize("needs", subsets(4), ids=lambda n: "".join("01"[b] for b in n))
def test_gradients_of_every_subset(device, needs):
    inputs = [*qkv(device, torch.float64, **SMALL), make(device, torch.float64, 2, 1, 4)]
    for tensor, need in zip(inputs, needs, strict=True):
        tensor.requires_grad_(need)
    gradcheck(ours, tuple(inputs))


VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": -0.7},
    "dropout": {"dropout_p": 0.4},
    "dropout_causal": {"dropout_p": 0.4, "is_causal": True},
}


@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients(device, kwargs):
    function = seeded(3, lambda *args: ours(*args, **kwargs))
    gradcheck(function, qkv(device, torch.float64, **SMALL))


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 3, 1), (1, 1, 3, 4)])
def test_gradients_of_mask(device, shape):
    mask = make(device, torch.float64, *shape)
    gradcheck(ours, (*qkv(device, torch.float64, **SMALL), mask))


def test_gradients_with_hidden_rows(device):
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], device=device) > 0
    gradcheck(lambda *args: ours(*args, mask), qkv(device, torch.float64, **SMALL))


def test_gradients_of_grouped_heads(device):
    inputs = qkv(device, torch.float64, 1, 4, 3, 2, 2, H_kv=2)
    gradcheck(lambda *args: ours(*args, enable_gqa=True), inputs)
    gradcheck(ours, (make(device, torch.float64, 2, 3, 2), *inputs[1:]), forward_ad=False)


def test_second_order_against_native(device):
    """In blocks of rows (S_q past one block) the second derivative is native's math path's."""
    q, k, v = qkv(device, torch.float64, 2, 8, 700, 900, 4, H_kv=4)
    mask = make(device, torch.float64, 8, 700, 1)
    inputs = (q, k, v, mask)

    def second(function):
        out = function(*inputs)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    def reference(q, k, v, mask):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return ((q @ k.mT) / 2 + mask).softmax(-1) @ v

    torch.testing.assert_close(
        second(lambda *args: ours(*args, enable_gqa=True)), second(reference), rtol=1e-8, atol=1e-9
    )


def test_third_derivative(device):
    def third(function):
        torch.manual_seed(0)
        inputs = [make(device, torch.float64, 1, 1, 3, 2) for _ in range(3)]
        value = function(*inputs).pow(3).sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            value = sum(g.pow(2).sum() for g in grads)
        return grads

    def reference(q, k, v):
        return ((q @ k.mT) / 2**0.5).softmax(-1) @ v

    torch.testing.assert_close(third(ours), third(reference))


def test_func_transforms(device):
    q, k, v = (t.detach() for t in qkv(device, torch.float64, 2, 2, 3, 4, 2))

    def reference(q, k, v):
        return ((q @ k.mT) / 2**0.5).softmax(-1) @ v

    def loss(f):
        return lambda *args: f(*args).sin().sum()

    def tree(f, *args):
        return torch.utils._pytree.tree_leaves(f(*args))

    for transform in (
        lambda f: torch.func.grad(loss(f), argnums=(0, 1, 2)),
        lambda f: torch.func.grad(
            lambda *a: sum(g.sin().sum() for g in torch.func.grad(loss(f), argnums=(0, 1, 2))(*a))
        ),
        lambda f: torch.func.jacrev(f, argnums=(0, 2)),
        lambda f: torch.func.jacfwd(f, argnums=(0, 1, 2)),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.vmap(f, in_dims=(0, None, 0)),
        lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(1, 2))),
        lambda f: torch.func.hessian(loss(f), argnums=(0, 1)),
        lambda f: lambda *a: torch.func.jvp(f, a, tuple(t.cos() for t in a)),
        lambda f: lambda *a: torch.func.vjp(f, *a)[1](torch.ones_like(q)),
    ):
        actual, expected = tree(transform(ours), q, k, v), tree(transform(reference), q, k, v)
        torch.testing.assert_close(actual, expected)


def test_forward_ad_with_mask_and_dropout(device):
    q, k, v = (t.detach() for t in qkv(device, torch.float64, 2, 2, 30, 40, 4))
    mask = torch.randn(30, 40, device=device, dtype=torch.float64)
    tangents = tuple(torch.randn_like(t) for t in (q, k, v, mask))
    torch.manual_seed(5)
    *_, philox_state = torch.ops.warpwright.attention(q, k, v, mask[None, None], 0.3, False, None)
    factors = torch.ops.warpwright.attention_dropout_factors(
        philox_state, torch.float64, 0.3, 2, 2, 0, 30, 40
    )

    def reference(q, k, v, mask):
        return (((q @ k.mT) / 2 + mask).softmax(-1) * factors) @ v

    function = seeded(5, lambda *args: ours(*args, dropout_p=0.3))
    torch.testing.assert_close(
        torch.func.jvp(function, (q, k, v, mask), tangents),
        torch.func.jvp(reference, (q, k, v, mask), tangents),
    )


def test_opcheck(device):
    ops = torch.ops.warpwright
    q, k, v = qkv(device, torch.float32, 2, 4, 5, 7, H_kv=2)
    mask = make(device, torch.float32, 1, 4, 5, 1)
    opcheck(ops.scaled_dot_product_attention.default, (q, k, v, mask), {"enable_gqa": True})
    opcheck(ops.scaled_dot_product_attention.default, (q[0, 0], k[0], v[1, 0]))
    bshd = torch.randn(2, 5, 4, 8, device=device).transpose(1, 2).requires_grad_()
    opcheck(ops.attention.default, (bshd, k, v, mask, 0.0, False, None))
    opcheck(ops.attention.default, (bshd.mT.contiguous().mT, k, v, None, 0.0, True, 0.5))
    detached = [t.detach() for t in (bshd, k, v, mask)]
    out, lse, state = ops.attention(*detached, 0.0, True, None)
    for output_mask in ([True] * 4, [False, True, False, False]):
        args = (bshd, k, v, mask, out, lse, state, 0.0, True, None, output_mask)
        opcheck(ops.attention_backward.default, (torch.randn_like(out).requires_grad_(), *args))
    _, _, state = ops.attention(*detached, 0.5, True, None)
    opcheck(ops.attention_dropout_factors.default, (state, torch.float32, 0.5, 2, 4, 0, 5, 7))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(q, k, v, mask):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(out, k, v, mask, enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for S in (8, 13):
        q, k, v = qkv(device, torch.float32, 2, 4, S, S, 8, H_kv=2)
        inputs = (q, k, v, make(device, torch.float32, S, S))
        expected, actual = step(*inputs), compiled(*inputs)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
        )


def test_compile_with_dropout(device):
    q, k, v = qkv(device, torch.float32, 2, 4, 20, 20, 8)
    compiled = torch.compile(
        lambda *args: ours(*args, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )

    def run(function):
        out = seeded(7, function)(q, k, v)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    assert_same(run(compiled), run(lambda *args: ours(*args, dropout_p=0.5)))


def test_autocast(device):
    q, k, v = qkv(device, torch.float32)
    mask = torch.randn(5, 7, device=device)
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=low):
            out = ours(q, k, v, mask)
            assert out.dtype == low == native(q, k, v, mask).dtype
            assert ours(q, k.to(low), v).dtype == low
            assert ours(q.double(), k.double(), v.double()).dtype == torch.float64
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad.dtype == torch.float32
        assert_same(out, ours(q.to(low), k.to(low), v.to(low), mask.to(low)))


BAD = {
    "rank": (lambda t: (t(8), t(7, 8), t(7, 8)), {}, "at least 2 dimensional"),
    "dtype": (lambda t: (t(5, 8).double(), t(7, 8), t(7, 8)), {}, "to have the same dtype"),
    "integer": (lambda t: (t(5, 8).int(),) * 3, {}, "expected scalar type Float.* but found Int"),
    "head_dim": (lambda t: (t(3, 5, 8), t(3, 7, 9), t(3, 7, 8)), {}, "Expected size for first two"),
    "length": (lambda t: (t(5, 8), t(7, 8), t(6, 8)), {}, "Expected size for first two"),
    "batch": (
        lambda t: (t(2, 3, 5, 8), t(3, 3, 7, 8), t(3, 3, 7, 8)),
        {},
        r"The size of tensor a \(2\) must match the size of tensor b \(3\) at non-singleton "
        "dimension 0",
    ),
    "heads": (
        lambda t: (t(2, 6, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8)),
        {},
        r"The size of tensor a \(6\) must match the size of tensor b \(3\)",
    ),
    "groups": (
        lambda t: (t(2, 5, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8)),
        {"enable_gqa": True},
        "Number of heads in key and value must divide the number of heads in",
    ),
    "mask_length": (
        lambda t: (t(2, 3, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8), t(5, 6)),
        {},
        r"The size of tensor a \(7\) must match the size of tensor b \(6\) at non-singleton "
        "dimension 3",
    ),
    "mask_rank": (
        lambda t: (t(2, 3, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8), t(4, 2, 3, 5, 7)),
        {},
        "doesn't match the broadcast shape",
    ),
    "mask_dtype": (
        lambda t: (t(5, 8), t(7, 8), t(7, 8), t(5, 7).int()),
        {},
        "Expected attn_mask dtype to be bool or float or to match query dtype",
    ),
    "mask_double": (
        lambda t: (t(5, 8), t(7, 8), t(7, 8), t(5, 7).double()),
        {},
        "Expected attn_mask dtype to be bool or float or to match query dtype",
    ),
    "dropout_high": (
        lambda t: (t(5, 8), t(7, 8), t(7, 8)),
        {"dropout_p": 1.1},
        "dropout probability has to be between 0 and 1, but got 1.1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(device, name):
    make_args, kwargs, message = BAD[name]
    args = make_args(lambda *shape: torch.randn(shape, device=device))
    with pytest.raises(RuntimeError):
        native(*args, **kwargs)
    with pytest.raises(RuntimeError, match=message):
        ours(*args, **kwargs)


def test_bad_input_that_native_takes_or_names_otherwise(device):
    q, k, v = (t.detach() for t in qkv(device, torch.float32))
    for p in (-0.1, float("nan")):
        with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
            ours(q, k, v, dropout_p=p)
    for i in (..., 0):  # native reads whatever lies there (of 3 dimensions: in newer releases)
        with pytest.raises(RuntimeError, match="Expected size for first two"):
            ours(q[i], k[i][..., :6, :], v[i])
    with pytest.raises(NotImplementedError, match="complex"):
        ours(*(t.to(torch.complex64) for t in (q, k, v)))
    with pytest.raises(IndexError, match="Dimension out of range"):
        ours(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True)
    with pytest.raises(RuntimeError, match="same device type"):
        ours(q.to("meta"), k, v)
    with pytest.raises(RuntimeError, match="attn_mask: expected device"):
        ours(q, k, v, torch.zeros(5, 7, device="meta"))


@pytest.mark.gpu
def test_cuda_graph_with_dropout():
    q, k, v = (t.detach() for t in qkv("cuda", torch.bfloat16, 2, 4, 200, 200, 64))

    def step():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = ours(*leaves, dropout_p=0.2)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    graph, results = captured(step)
    graph.replay()
    first = [t.clone() for t in results]
    graph.replay()
    assert not torch.equal(first[0], results[0])  # every replay draws anew
    for seed in (1, 1):
        torch.cuda.manual_seed(seed)
        graph.replay()
        again = [t.clone() for t in results]
    torch.cuda.manual_seed(1)
    graph.replay()
    assert_same(list(results), again)


@pytest.mark.gpu
@pytest.mark.parametrize("second_order", [False, True])
def test_no_score_matrix_in_memory(second_order):
    B, H, S, D = 1, 4, 8192, 64
    q, k, v = qkv("cuda", torch.bfloat16, B, H, S, S, D)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ours(q, k, v)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v), create_graph=second_order)
    if second_order:
        torch.autograd.grad(sum(g.float().sum() for g in grads), (q, k, v))
    scores = B * H * S * S * 4
    assert torch.cuda.max_memory_allocated() - before < scores / 2
