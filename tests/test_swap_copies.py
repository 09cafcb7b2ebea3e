"""swap(fuse=True): what follows a block with layer scale reads a 16-bit copy of its output."""

import copy
import itertools
import pickle

import pytest
import torch
from common import gradcheck
from test_swap_scales import CAST, NODE, Tokens, cn_block, images, names, results, rows, timm_block
from torch import nn
from torch.utils.checkpoint import checkpoint

from warpwright import swap, unswap
from warpwright.swap import scales
from warpwright.swap.residual import CASTS
from warpwright.testing import assert_as_good_as_native, assert_same

OP = torch.ops.warpwright.layer_scale_add_with_copy
PLAIN = torch.ops.warpwright.layer_scale_add
CAST_OP = torch.ops.warpwright.cast_with_residual
BF16 = torch.bfloat16


def stage(make=cn_block, blocks=3, drop=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(make(drop=drop) for _ in range(blocks)))


def has_copy(x):
    return scales.COPY in vars(x)


@pytest.fixture
def taken(monkeypatch):
    """Whether each call of ``cast_with_residual`` got a copy."""
    found, right = [], scales._copy_of

    def copy_of(x):
        copied = right(x)
        found.append(copied is not None)
        return copied

    monkeypatch.setattr(scales, "_copy_of", copy_of)
    return found


def forward(model, x):
    with torch.autocast(x.device.type, BF16):
        return model(x)


# ---- the operators ----


@pytest.mark.parametrize("shape", [(2, 16, 5, 3), (3, 7, 2, 2), (2, 96, 9, 9)], ids=str)
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_copy_is_a_cast(shape, drop, last, device):
    torch.manual_seed(0)
    x, residual = (torch.randn(shape, device=device) for _ in range(2))
    if last:
        x, residual = (t.to(memory_format=torch.channels_last) for t in (x, residual))
    scale = torch.randn(shape[1], 1, 1, device=device)
    samples = torch.rand(shape[0], 1, 1, 1, device=device) if drop else None
    for dtype, wide in itertools.product((BF16, torch.float16), (True, False)):
        added = residual if wide else residual.to(dtype)
        leaves = [t.detach().requires_grad_() for t in (x.to(dtype), added, scale)]
        expected = PLAIN(*leaves, samples)
        output, copied = OP(*leaves, samples, dtype)
        assert_same(output, expected)
        assert_same(copied, expected.detach().to(dtype))
        assert copied.stride() == output.stride()
        assert not copied.requires_grad
        assert NODE in names(output) or samples is None
        cotangent = torch.randn_like(output)
        theirs = torch.autograd.grad(expected, leaves, cotangent)
        for m, t in zip(torch.autograd.grad(output, leaves, cotangent), theirs, strict=True):
            assert_same(m, t)


@pytest.mark.parametrize("other", ["float32", "float64", "another 16-bit type", "no gradient"])
def test_other_dtypes(other, device):
    x, residual = (
        torch.randn(2, 3, 16, device=device).to(BF16),
        torch.randn(2, 3, 16, device=device),
    )
    scale = torch.randn(16, device=device, requires_grad=other != "no gradient")
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(other, torch.float16)
    output, copied = OP(x, residual, scale, None, BF16 if other == "no gradient" else dtype)
    assert_same(output, PLAIN(x, residual, scale))
    assert_same(copied, output.detach().to(copied.dtype))
    assert output.requires_grad == scale.requires_grad


def test_derivatives(device):
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in ((2, 3), (2, 3), (3,))]
    leaves = [t.requires_grad_() for t in tensors]
    gradcheck(lambda *a: OP(*a, None, torch.float64)[0], leaves)
    samples = torch.randn(4, 2, 3, dtype=torch.float64, device=device)
    batched = torch.func.vmap(lambda t: OP(t, *leaves[1:], None, BF16))(samples)
    assert_same(batched[0], leaves[1] + leaves[2] * samples)
    assert_same(batched[1], batched[0].detach().to(BF16))


def test_malformed(device):
    x, scale = torch.randn(2, 3, device=device), torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match="dtype: expected a floating point type, got Int"):
        OP(x, x, scale, None, torch.int32)
    with pytest.raises(RuntimeError, match="residual: expected shape"):
        OP(x, x[:1], scale, None, BF16)


def test_known_cast(device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    known = x.detach().to(BF16)
    residual, cast = CAST_OP(x, BF16, known)
    assert cast.data_ptr() == known.data_ptr()
    assert not known.requires_grad
    wide, narrow = torch.randn_like(x), torch.randn_like(known)
    (both,) = torch.autograd.grad((residual, cast), x, (wide, narrow))
    assert_same(both, wide + narrow)


@pytest.mark.parametrize("fault", ["dtype", "shape", "order", "history", "no gradient"])
def test_other_casts_are_not_taken(fault, device):
    x = torch.randn(4, 16, device=device, requires_grad=fault != "no gradient")
    known = {
        "dtype": x.detach().half(),
        "shape": x.detach().to(BF16)[:2],
        "order": x.detach().to(BF16).t().contiguous().t(),
        "history": x.to(BF16),
        "no gradient": x.detach().to(BF16),
    }[fault]
    cast = CAST_OP(x, BF16, known)[1]
    assert cast.data_ptr() != known.data_ptr()
    assert_same(cast.detach(), x.detach().to(BF16))


# ---- swapped stages ----


@pytest.mark.parametrize("make", [cn_block, timm_block])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_stage_gives_the_bits_of_one_without_copies(make, drop, device, taken, monkeypatch):
    """A copy is what the cast would write."""
    model = stage(make, drop=drop).to(device)
    swap(model, fuse=True)
    x = images(device)
    mine = results(model, x, BF16)
    assert taken == [False, True, True]
    assert {NODE, CAST} <= names(mine[0])
    monkeypatch.setattr(scales, "_copied", lambda a, dtype: scales.F.layer_scale_add(*a))
    for m, t in zip(mine, results(model, x, BF16), strict=True):
        assert_same(m, t)
    assert taken[3:] == [False] * 3


@pytest.mark.parametrize("make", [cn_block, timm_block])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("autocast", [None, BF16, torch.float16], ids=str)
def test_stage_agrees_with_native(make, train, autocast, device, taken):
    model = stage(make).to(device).train(train)
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    swap(model, fuse=True)
    sums = []
    for seed in range(8):
        torch.manual_seed(seed)
        x = images(device)
        taken.clear()
        mine, theirs = results(model, x, autocast), results(native, x, autocast)
        assert taken == ([] if autocast is None else [False, True, True])
        exact_results = results(exact, x.double())
        norms = []
        for m, t, e in zip(mine, theirs, exact_results, strict=True):
            assert (m.dtype, m.shape) == (t.dtype, t.shape)
            norms.append([torch.linalg.vector_norm(v.double() - e).item() for v in (m, t)])
        sums.append(torch.tensor(norms))
    # Of 16 numbers the error is chance, also after some inputs; the mean over all tensors is not.
    ours, native_error = sum(sums).unbind(1)
    ratios = ours / (native_error + 1e-6)
    assert ratios.max() <= 1.5
    assert ratios.mean() <= 1.2


def test_only_what_is_read_is_copied(device):
    """The last block's reader is no block; without gradients autocast casts by itself."""
    model = stage().to(device)
    swap(model, fuse=True)
    x = images(device).requires_grad_()
    y = forward(model[0], x)
    assert has_copy(y)
    z = forward(model[1], y)
    assert not has_copy(y)
    assert has_copy(z)
    assert not has_copy(forward(model[2], z))
    assert not has_copy(model[0](x))
    with torch.no_grad():
        assert not has_copy(forward(model[0], x))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not has_copy(forward(model[0], x.detach()))


def test_a_changed_output_is_cast_again(device, taken):
    model = stage().to(device)
    swap(model, fuse=True)
    x = images(device).requires_grad_()
    y = forward(model[0], x)
    y.add_(1)
    result = forward(model[1], y)
    assert taken == [False, False]
    assert_same(result, forward(model[1], y.clone()))


def test_the_outputs_gradient_is_whole(device):
    """A hook on a block may keep its output and ask for its gradient."""
    model = stage().to(device)
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    x, kept = images(device).requires_grad_(), []
    for net in (native, model):
        net[0].register_forward_hook(lambda m, a, out: kept.append(out))
        y = forward(net, x)
        (kept[-1],) = torch.autograd.grad(y.square().sum(), kept[-1])
    torch.testing.assert_close(*kept, rtol=0.05, atol=0.05 * kept[0].abs().max().item())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, device):
    model = stage().to(device)
    swap(model, fuse=True)
    x = images(device)
    expected = results(model, x, BF16)

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            for block in self.inner:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    found = Checkpointed(model)
    x = x.requires_grad_()
    y = forward(found, x)
    y.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    for m, t in zip((y, *gradients), expected, strict=True):
        torch.testing.assert_close(m, t, rtol=0.02, atol=0.02 * t.abs().max().item())


def test_hooks_on_a_layer_of_the_second_block(device, taken):
    """Its own forward then runs, and the copy stays with the output."""
    model = stage(blocks=2).to(device)
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    model[1].stochastic_depth.register_forward_hook(lambda *_: None)
    x = images(device)
    for m, t in zip(results(model, x, BF16), results(native, x, BF16), strict=True):
        torch.testing.assert_close(m, t, rtol=0.05, atol=0.05 * t.abs().max().item())
    assert taken == [False]  # the first block's own


def test_a_block_that_is_read_by_others_too():
    """One block stands in two places, and another layer follows in one of them."""
    torch.manual_seed(0)
    shared = cn_block()
    model = nn.Sequential(nn.Sequential(shared, cn_block()), nn.Sequential(shared, nn.Tanh()))
    swap(model, fuse=True)
    assert not has_copy(forward(shared, images().requires_grad_()))


@pytest.mark.parametrize("kind", ["parameter", "layer"])
def test_user_blocks(kind, device, taken):
    torch.manual_seed(0)
    model = nn.Sequential(Tokens(kind), Tokens(kind), nn.Linear(12, 4)).to(device)
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    x = rows(device)
    mine = results(model, x, BF16)
    assert taken == [False, True]
    for m, t in zip(mine, results(native, x, BF16), strict=True):
        torch.testing.assert_close(m, t, rtol=0.05, atol=0.05 * t.abs().max().item())


def test_copies_pickles_and_unswap(taken):
    model = stage()
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    x = images()
    expected = results(model, x, BF16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        taken.clear()
        for m, t in zip(results(twin, x, BF16), expected, strict=True):
            assert_same(m, t)
        assert taken == [False, True, True]
    unswap(model)
    for m, t in zip(results(model, x), results(native, x), strict=True):
        torch.testing.assert_close(m, t)


def test_compiles_in_one_graph():
    model = stage(blocks=2)
    swap(model, fuse=True)
    x = images().requires_grad_()
    expected = forward(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        y = compiled(x)
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.05)


# ---- norms in front of a convolution ----


def downsample(kind="torchvision"):
    if kind == "torchvision":
        norm = pytest.importorskip("torchvision.models.convnext").LayerNorm2d(16)
    else:
        norm = pytest.importorskip("timm.layers").LayerNorm2d(16)
    torch.manual_seed(0)
    model = nn.Sequential(norm, nn.Conv2d(16, 8, 2, 2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["torchvision", "timm"])
@pytest.mark.parametrize("autocast", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_norm_before_a_convolution(kind, autocast, narrow, device):
    model = downsample(kind).to(device)
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = swap(model, fuse=True)
    assert [e.note for e in report.entries] == [CASTS, ""]
    x = images(device)
    if narrow and autocast is not None:
        x = x.to(autocast)
    mine = results(model, x, autocast)
    theirs, truth = results(native, x, autocast), results(exact, x.double())
    for m, t, e in zip(mine, theirs, truth, strict=True):
        assert (m.dtype, m.shape) == (t.dtype, t.shape)
        assert_as_good_as_native(m, t, e, factor=2)
    y = forward(model, images(device).requires_grad_())
    assert "ToCopy" not in y.grad_fn.next_functions[0][0].name()  # of the convolution's input
    unswap(model)
    for m, t in zip(results(model, x, autocast), results(native, x, autocast), strict=True):
        assert_same(m, t)


def test_torchvisions_norm_alone(device):
    norm = downsample()[0].to(device)
    model = nn.Sequential(copy.deepcopy(norm))
    assert swap(model).entries[0].swapped
    x = images(device)
    torch.testing.assert_close(model(x), norm(x))
    assert model(x).stride() == norm(x).stride()


def test_torchvisions_convnext(device, taken):
    models = pytest.importorskip("torchvision.models.convnext")
    torch.manual_seed(0)
    settings = [models.CNBlockConfig(8, 16, 2), models.CNBlockConfig(16, None, 3)]
    model = models.ConvNeXt(settings, num_classes=5, layer_scale=1.0).to(device)
    model = model.to(memory_format=torch.channels_last)
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = swap(model, fuse=True)
    assert all(e.swapped for e in report.entries if "LayerNorm" in e.type)
    x = torch.randn(2, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    mine = results(model, x, BF16)
    assert taken.count(True) == 3  # the first block of a stage reads a convolution's 16 bits
    for m, t, e in zip(mine, results(native, x, BF16), results(exact, x.double()), strict=True):
        assert_as_good_as_native(m, t, e, factor=2)
