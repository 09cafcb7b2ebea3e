"""A window of keys and softcap in attention: values, derivatives, errors, and where else they exist."""

import pytest
import torch
from attention_cases import contiguous, native, qkv
from common import gradcheck, opcheck

import warpwright.functional as F
from warpwright import _native, explain
from warpwright.testing import assert_same, compare_with_native

ours = F.scaled_dot_product_attention


def inside(queries, keys, window, is_causal=False, device="cpu"):
    """(queries, keys): the window's definition, element by element."""
    left, right = (side if side >= 0 else queries + keys for side in window)
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    seen = (ahead >= -left) & (ahead <= right)
    return seen & (ahead <= 0) if is_causal else seen


def with_dense_mask(query, key, value, mask=None, *, window_size, is_causal=False, **kwargs):
    """The same by native, with a dense mask."""
    seen = inside(query.shape[-2], key.shape[-2], window_size, is_causal, query.device)
    if mask is None:
        mask = seen
    elif mask.dtype == torch.bool:
        mask = mask & seen
    else:
        mask = mask.masked_fill(~seen, float("-inf"))
    return native(query, key, value, mask, **kwargs)


def formula(query, key, value, mask=None, *, softcap, window_size=(-1, -1), is_causal=False):
    """In differentiable operations, with the scores in memory."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    seen = inside(query.shape[-2], key.shape[-2], window_size, is_causal, query.device)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    scores = scores.masked_fill(~seen, float("-inf"))
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0) @ value


def compare(inputs, reference, **kwargs):
    if inputs[0].dtype != torch.float64:
        compare_with_native(contiguous(ours), contiguous(reference), inputs, kwargs, factor=3)
        return
    leaves = [t for t in inputs if t.requires_grad]
    gqa = {"enable_gqa": True} if inputs[0].shape[1] != inputs[1].shape[1] else {}
    results = ours(*inputs, **kwargs, **gqa), reference(*inputs, **kwargs)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(y, leaves, results[1].detach().cos()) for y in results]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


LENGTHS = [(70, 90), (90, 70), (1, 40), (40, 1), (200, 200), (300, 129)]
WINDOWS = [(0, 0), (5, 0), (0, 7), (33, 20), (-1, 9), (64, -1)]


@pytest.mark.parametrize(("S_q", "S_k"), LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(device, dtype, S_q, S_k, window):
    q, k, v = qkv(device, dtype, 1, 2, S_q, S_k, 32)
    if dtype != torch.float64 and (window == (0, 0) or 1 in (S_q, S_k)):
        # Rows with one key: the exact gradients are 0, and rounding is all there would be.
        q, k = q.detach(), k.detach()
    compare((q, k, v), with_dense_mask, window_size=window)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_more_tiles_than_ctas(D):
    """Persistent kernels take several tiles per CTA, some of which see nothing."""
    inputs = qkv("cuda", torch.bfloat16, 2, 24, 700, 400, D, H_kv=8)
    compare(inputs, with_dense_mask, window_size=(90, 40), enable_gqa=True)


@pytest.mark.parametrize("extras", [{"window_size": (600, 0)}, {"window_size": (900, 30)}], ids=str)
def test_long_windows(device, extras):
    """Long enough for the forward's larger tiles on Hopper."""
    compare(qkv(device, torch.bfloat16, 1, 1, 2100, 2100, 64), with_dense_mask, **extras)


@pytest.mark.parametrize(("D", "D_v"), [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256)])
@pytest.mark.parametrize("window", [(40, 0), (20, 30)])
def test_head_dims(device, dtype, D, D_v, window):
    inputs = qkv(device, dtype, 1, 2, 300, 300, D, D_v)
    compare(inputs, with_dense_mask, window_size=window)
    compare(inputs, with_dense_mask, window_size=window, is_causal=True)


@pytest.mark.parametrize("cap", [0.7, 5.0, 50.0])
@pytest.mark.parametrize("D", [16, 64, 128, 256])
def test_softcap(device, dtype, cap, D):
    inputs = qkv(device, dtype, 1, 2, 130, 150, D)
    compare(inputs, formula, softcap=cap)
    compare(inputs, formula, softcap=cap, window_size=(30, 10))
    compare(inputs, formula, softcap=cap, is_causal=True)


@pytest.mark.parametrize("cap", [1e-3, 5e3])
def test_unusual_softcap(device, dtype, cap):
    """Tensor-core kernels would lose digits: of tanh, or of its derivative."""
    compare(qkv(device, dtype, 1, 2, 70, 90, 64), formula, softcap=cap, window_size=(60, 20))


def test_softcap_of_large_scores(device, dtype):
    """Scores far above the cap: tanh is 1, its derivative 0."""
    q, k, v = qkv(device, dtype, 1, 2, 70, 70, 16)
    with torch.no_grad():
        q *= 100
    compare((q, k, v), formula, softcap=2.0)
    out = ours(q * 50, k, v, softcap=2.0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_with_masks(device, dtype):
    q, k, v = qkv(device, dtype, 2, 3, 70, 90, 16)
    bias = torch.randn(3, 70, 90, device=device).to(dtype).requires_grad_()
    boolean = torch.rand(2, 1, 70, 90, device=device) < 0.7
    for mask in (bias, boolean):
        compare((q, k, v, mask), with_dense_mask, window_size=(20, 30))
        compare((q, k, v, mask), formula, softcap=3.0)
        compare((q, k, v, mask), formula, softcap=3.0, window_size=(20, 30), is_causal=True)


def test_groups_of_heads(device):
    q, k, v = qkv(device, torch.float64, 2, 6, 70, 70, 16, H_kv=2)
    compare((q, k, v), formula, softcap=4.0, window_size=(11, 3))


def test_dropout_is_that_of_the_dense_mask(device, dtype):
    """The same elements are dropped: the draw depends on the position alone."""
    q, k, v = qkv(device, dtype, 2, 2, 150, 150, 64)
    results = []
    for kwargs in (
        {"window_size": (50, 20)},
        {"attn_mask": inside(150, 150, (50, 20), device=device)},
    ):
        torch.manual_seed(3)
        out = ours(q, k, v, dropout_p=0.3, **kwargs)
        results.append((out, *torch.autograd.grad(out, (q, k, v), v.detach())))
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(*results, **tolerance)


def test_rows_that_see_nothing(device, dtype):
    """They are 0, have zero gradients and add nothing to those of keys and values."""
    q, k, v = qkv(device, dtype, 1, 2, 200, 70, 64)
    out = ours(q, k, v, window_size=(10, 0))
    assert (out[:, :, 80:] == 0).all()
    assert (out[:, :, :80] != 0).any(-1).all()
    grads = torch.autograd.grad(out[:, :, 80:].sum(), (q, k, v))
    assert all((g == 0).all() for g in grads)


def test_equal_bits(device, dtype):
    """A limit that hides nothing takes the plain kernels; every call repeats its bits."""
    q, k, v = qkv(device, dtype, 1, 2, 200, 200, 64)

    def run(**kwargs):
        out = ours(q, k, v, **kwargs)
        return out, *torch.autograd.grad(out, (q, k, v), v.detach())

    for same in ({}, {"window_size": (-1, -1)}, {"window_size": (199, 500)}, {"softcap": 0.0}):
        assert_same(run(**same), run())
    for same in ({"window_size": (-1, 0)}, {"window_size": (400, 7), "is_causal": True}):
        assert_same(run(**same), run(is_causal=True))
    for kwargs in (
        {"window_size": (50, 0)},
        {"softcap": 2.0},
        {"window_size": (9, 9), "softcap": 1.0},
    ):
        first = run(**kwargs)
        for _ in range(3):
            assert_same(run(**kwargs), first)


DERIVATIVES = [{"window_size": (1, 1)}, {"softcap": 1.3}, {"window_size": (1, 0), "softcap": 0.8}]


@pytest.mark.parametrize("kwargs", DERIVATIVES, ids=str)
def test_derivatives(device, kwargs):
    q, k, v = qkv(device, torch.float64, 1, 2, 3, 4, 2, H_kv=1)
    mask = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda *t: ours(*t, **kwargs, enable_gqa=True), (q, k, v, mask))


@pytest.mark.parametrize("kwargs", DERIVATIVES, ids=str)
def test_vmap(device, kwargs):
    q, k, v = (torch.randn(3, 2, 2, 9, 4, device=device) for _ in range(3))

    def loss(q, k, v):
        return ours(q, k, v, **kwargs).square().sum()

    batched = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    single = [torch.func.grad(loss, (0, 1, 2))(*sample) for sample in zip(q, k, v, strict=True)]
    for got, expected in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(q, k, v):
        out = ours(q, k, v, window_size=(20, 3), softcap=5.0)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    compiled = torch.compile(step, backend="aot_eager", dynamic=dynamic, fullgraph=False)
    for length in (50, 70):
        inputs = qkv(device, torch.float32, 1, 2, length, length, 16)
        assert_same(compiled(*inputs), step(*inputs))


def test_opcheck(device):
    q, k, v = qkv(device, torch.float32, 1, 2, 9, 7, 4)
    extras = {"window_left": 2, "window_right": 1, "softcap": 1.5}
    ops = torch.ops.warpwright
    opcheck(ops.scaled_dot_product_attention_extras.default, (q, k, v), extras)
    opcheck(ops.attention.default, (q, k, v, None, 0.0, False, None, 2, 1, 1.5))
    out, lse, state = (
        t.detach() for t in ops.attention(q, k, v, None, 0.0, False, None, 2, 1, 1.5)
    )
    args = (out, q, k, v, None, out, lse, state, 0.0, False, None, [True, True, True, False])
    opcheck(ops.attention_backward.default, (*args, 2, 1, 1.5))


def test_negative_limits(device):
    """The operator's window may lie aside of the query; the function's may not."""
    q, k, v = (t.detach() for t in qkv(device, torch.float64, 1, 2, 40, 60, 8))
    for left, right in ((-3, 9), (12, -4), (None, -2), (-1, None)):
        ahead = torch.arange(60, device=device) - torch.arange(40, device=device)[:, None]
        seen = (ahead >= -(60 if left is None else left)) & (
            ahead <= (60 if right is None else right)
        )
        out = torch.ops.warpwright.attention(q, k, v, None, 0.0, False, None, left, right)[0]
        torch.testing.assert_close(out, native(q, k, v, seen))


def test_native_form(device):
    """What GPUs without kernels and exported programs run."""
    q, k, v = qkv(device, torch.float64, 2, 4, 20, 30, 8, H_kv=2)
    bias = torch.randn(20, 30, device=device, dtype=torch.float64)
    for mask in (None, bias, bias > 0):
        for extras in (
            {"window_left": 4},
            {"window_left": 4, "window_right": 2, "softcap": 2.0},
            {"softcap": 3.0, "is_causal": True},
        ):
            options = {"attn_mask": mask, "enable_gqa": True, **extras}
            expected = torch.ops.warpwright.scaled_dot_product_attention_extras(q, k, v, **options)
            torch.testing.assert_close(
                _native.scaled_dot_product_attention_extras(q, k, v, **options), expected
            )


def test_autocast(device):
    q, k, v = qkv(device, torch.float32, 1, 2, 20, 20, 16)
    with torch.autocast(device.type if hasattr(device, "type") else device, torch.bfloat16):
        out = ours(q, k, v, window_size=(4, 4), softcap=5.0)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"window_size": 4}, ValueError, "window_size to be a pair .left, right., but got 4"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size to be a pair"),
        (
            {"window_size": (-2, 0)},
            ValueError,
            r"at least 0, or -1 for no limit, but got \(-2, 0\)",
        ),
        ({"window_size": (0.5, 0)}, TypeError, "'window_size' must be int, not float"),
        ({"softcap": -1.0}, RuntimeError, "softcap: expected a positive finite number.*got -1"),
        ({"softcap": float("nan")}, RuntimeError, "softcap: expected a positive finite number"),
        ({"softcap": float("inf")}, RuntimeError, "softcap: expected a positive finite number"),
        ({"softcap": "2"}, TypeError, "'softcap' must be float, not str"),
    ],
)
def test_errors(device, kwargs, error, match):
    x = torch.randn(1, 2, 4, 8, device=device)
    with pytest.raises(error, match=match):
        ours(x, x, x, **kwargs)


def test_explain():
    def lines(dtype=torch.bfloat16, **kwargs):
        x = torch.empty(1, 2, 4096, 64, dtype=dtype)
        return explain("scaled_dot_product_attention", x, x, x, device="h200", **kwargs)

    assert lines(window_size=(1023, 0)).count("blocks outside the window are skipped") == 2
    assert lines(softcap=50.0).count("outside the window") == 2
    assert lines(window_size=(-1, 0)) == lines(is_causal=True)
    assert lines(window_size=(9000, -1)) == lines()
    masked = lines(window_size=(9, 9), attn_mask=torch.ones(4096, 4096, dtype=torch.bool))
    assert masked.count("window or softcap with mask or dropout") == 2
    assert "FMA" in lines(torch.float32, window_size=(9, 9))
    assert "unusual softcap" in lines(softcap=1e5)
