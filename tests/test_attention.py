"""scaled_dot_product_attention gives native's values and gradients, and refuses what native refuses."""

import itertools

import pytest
import torch
from attention_cases import compare, make, native, ours, qkv
from common import subsets

from warpwright.testing import assert_same

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
