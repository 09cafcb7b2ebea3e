"""split_qkv: a fused projection's gradient is the memory that attention's backward wrote."""

import copy

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import warpwright.functional as F
from warpwright import nn as ours
from warpwright import swap
from warpwright._ops import ops
from warpwright.testing import assert_same

B, S, H, D = 2, 5, 3, 8


def projected(device, dtype=torch.float32, lead=(B, S)):
    torch.manual_seed(0)
    return torch.randn(*lead, 3 * H * D, device=device, dtype=dtype, requires_grad=True)


def natively(qkv, heads=H):
    return tuple(third.unflatten(-1, (heads, -1)) for third in qkv.chunk(3, -1))


def attend(qkv, split=ops.split_qkv, order=(0, 2, 1, 3), **options):
    return F.scaled_dot_product_attention(*(x.permute(order) for x in split(qkv, H)), **options)


def copies(function):
    """The operators that `function` runs which gather tensors into one."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        function()
    return [e.name for e in record.events() if e.name in ("aten::cat", "aten::stack")]


@pytest.mark.parametrize("lead", [(), (S,), (B, S), (2, B, S)])
def test_splits_as_native(device, lead):
    qkv = projected(device, lead=lead)
    for mine, native in zip(ops.split_qkv(qkv, H), natively(qkv), strict=True):
        assert_same(mine, native)
        assert mine.stride() == native.stride()
        assert mine.storage_offset() == native.storage_offset()
    grads = [torch.randn_like(x) for x in natively(qkv)]
    mine, native = (
        torch.autograd.grad(split(qkv, H), qkv, grads)[0] for split in (ops.split_qkv, natively)
    )
    assert_same(mine, native)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 2, 0, 3)], ids=["batch", "sequence"])
@pytest.mark.parametrize("mask", [False, True])
def test_gradient_is_no_copy(device, dtype, order, mask):
    options = {"is_causal": not mask}
    if mask:
        length = S if order[0] == 0 else B
        options["attn_mask"] = torch.rand(length, length, device=device) > 0.3
    qkv = projected(device, dtype)
    y = attend(qkv, order=order, **options)
    grad = torch.randn_like(y)
    found = []
    assert copies(lambda: found.append(torch.autograd.grad(y, qkv, grad)[0])) == []
    native = projected(device, dtype)
    y = attend(native, natively, order, **options)
    assert copies(lambda: found.append(torch.autograd.grad(y, native, grad)[0])) != []
    assert_same(*found)  # the same kernels
    assert found[0].is_contiguous()


def test_gradient_that_needs_a_copy(device):
    """One of the three unused, each used on its own, or a gradient from elsewhere."""
    uses = (
        lambda q, k, v: q.sin(),
        lambda q, k, v: (q + k) * v,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v.detach()),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + q,
        lambda q, k, v: F.scaled_dot_product_attention(q, q, q),
        lambda q, k, v: F.scaled_dot_product_attention(k, q, v),
    )
    qkv = projected(device, torch.float64)
    for use in uses:
        results = [use(*(x.transpose(1, 2) for x in s(qkv, H))) for s in (ops.split_qkv, natively)]
        mine, native = (torch.autograd.grad(y, qkv, torch.ones_like(y))[0] for y in results)
        torch.testing.assert_close(mine, native, rtol=1e-12, atol=1e-12)


def test_empty(device):
    for lead in ((0, S), (B, 0)):
        qkv = projected(device, lead=lead)
        (grad,) = torch.autograd.grad(attend(qkv).sum(), qkv)
        assert grad.shape == qkv.shape


def test_derivatives(device):
    qkv = projected(device, torch.float64)
    function = lambda x: attend(x, is_causal=True)  # noqa: E731
    assert gradcheck(function, (qkv,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (qkv,))
    odd = torch.randn(2, 5, 3 * 12, dtype=torch.float64, device=device, requires_grad=True)
    thirds = lambda x: [t * t for t in ops.split_qkv(x, 3)]  # noqa: E731
    assert gradgradcheck(thirds, (odd,))  # no two extents alike
    with forward_ad.dual_level():
        tangent = torch.randn_like(qkv)
        mine, native = (
            forward_ad.unpack_dual(attend(forward_ad.make_dual(qkv, tangent), split)).tangent
            for split in (ops.split_qkv, natively)
        )
    torch.testing.assert_close(mine, native)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: attend(x[None]).sin().sum()))
    (native,) = torch.autograd.grad(attend(qkv, natively).sin().sum(), qkv)
    torch.testing.assert_close(per_sample(qkv.detach()), native)


def test_dropout_and_lse(device):
    qkv = projected(device)

    def gradient(split):
        torch.manual_seed(3)
        y, lse = attend(qkv, split, dropout_p=0.4, return_lse=True)
        return torch.autograd.grad([y.sum(), lse.sin().sum()], qkv)[0]

    assert_same(gradient(ops.split_qkv), gradient(natively))


def test_saved_tensors_that_move(device):
    qkv = projected(device)
    with torch.autograd.graph.save_on_cpu():
        y = attend(qkv)
    (moved,) = torch.autograd.grad(y.sum(), qkv)
    (stayed,) = torch.autograd.grad(attend(qkv).sum(), qkv)
    assert_same(moved, stayed)


def test_modes_see_the_op(device):
    counts = []
    for split in (ops.split_qkv, natively):
        qkv = projected(device)
        with FlopCounterMode(display=False) as counter:
            attend(qkv, split).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with profile(activities=[ProfilerActivity.CPU]) as record:
        attend(projected(device)).sum().backward()
    assert [e.name for e in record.events()].count("warpwright::attention_backward") == 1


def test_writes_raise(device):
    qkv = projected(device)
    q, _, _ = ops.split_qkv(qkv * 1, H)
    with pytest.raises(RuntimeError, match="modified inplace"):
        q.mul_(2)
    plain = qkv.detach().clone()
    ops.split_qkv(plain, H)[0].zero_()  # as with native's views
    assert not plain[..., : H * D].any()


def test_intermediate_gradients(device):
    qkv = projected(device)
    thirds = ops.split_qkv(qkv, H)
    seen = []
    thirds[1].register_hook(lambda grad: seen.append(grad.clone()))
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in thirds))
    of_q, of_whole = torch.autograd.grad(y.sum(), [thirds[0], qkv])
    assert_same(of_whole[..., : H * D].unflatten(-1, (H, D)), of_q)
    assert_same(of_whole[..., H * D : 2 * H * D].unflatten(-1, (H, D)), seen[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_and_exports(device, dynamic):
    qkv = projected(device)
    mine = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")(qkv)
    torch.testing.assert_close(mine, attend(qkv))
    (grad,), (expected,) = (torch.autograd.grad(y.sum(), qkv) for y in (mine, attend(qkv)))
    torch.testing.assert_close(grad, expected)

    class Split(torch.nn.Module):
        def forward(self, x):
            return ops.split_qkv(x, H)

    program = torch.export.export(Split(), (qkv.detach(),)).run_decompositions()
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert not any("warpwright" in str(target) for target in targets)
    assert_same(program.module()(qkv.detach()), ops.split_qkv(qkv.detach(), H))


def test_errors(device):
    with pytest.raises(RuntimeError, match="heads: expected a positive number, got 0"):
        ops.split_qkv(projected(device), 0)
    with pytest.raises(RuntimeError, match="with 5 heads, got sizes"):
        ops.split_qkv(projected(device), 5)
    with pytest.raises(RuntimeError, match="qkv: expected a last dimension"):
        ops.split_qkv(torch.ones((), device=device), 1)


# ---- the layers that call it ----


@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(device, batch_first):
    torch.manual_seed(0)
    native = torch.nn.MultiheadAttention(H * D, H, batch_first=batch_first, device=device)
    mine = copy.deepcopy(native)
    mine.__class__ = ours.MultiheadAttention
    x = torch.randn(B, S, H * D, device=device, requires_grad=True)
    y = mine(x, x, x, need_weights=False)[0]
    assert copies(y.sum().backward) == []
    found, expected = (m(x, x, x, need_weights=False)[0] for m in (mine, native))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grads = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_models(device, name):
    library = pytest.importorskip(name)
    torch.manual_seed(0)
    if name == "timm":
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": H * D, "depth": 2, "num_heads": H}
        native = library.models.VisionTransformer(**sizes, num_classes=5)
        x = torch.randn(2, 3, 32, 32, device=device)
    else:
        sizes = {"n_embd": H * D, "n_layer": 2, "n_head": H, "n_positions": 16, "vocab_size": 11}
        sizes["use_cache"] = False  # which would copy keys and values
        config = library.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        native = library.GPT2LMHeadModel(config)
        x = torch.randint(0, 11, (2, 16), device=device)
    native = native.to(device)
    mine = copy.deepcopy(native)
    swap(mine)

    def loss(model):
        y = model(x)
        return (y if name == "timm" else y.logits).float().sin().sum()

    value = loss(mine)
    # Other layers gather too: timm's class token, once, in the forward.
    assert copies(value.backward) == []
    loss(native).backward()
    for a, b in zip(mine.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=2e-3)
