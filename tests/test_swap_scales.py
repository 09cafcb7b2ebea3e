"""swap(fuse=True): layer scale, stochastic depth and the shortcut as one op; casts and 16-bit norms."""

import copy
import pickle

import pytest
import torch
from torch import nn

from warpwright import swap, unswap
from warpwright.testing import assert_as_good_as_native

NODE = "WarpwrightLayerScaleAddBackward"
CAST = "WarpwrightCastWithResidualBackward"


def cn_block(dim=16, drop=0.0):
    block = pytest.importorskip("torchvision.models.convnext").CNBlock(dim, 1.0, drop)
    return with_weights(block)


def timm_block(dim=16, drop=0.0):
    return with_weights(
        pytest.importorskip("timm.models.convnext").ConvNeXtBlock(dim, dim, drop_path=drop)
    )


def with_weights(block):
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    return block.to(memory_format=torch.channels_last)


class Tokens(nn.Module):
    """A user's block over rows, with a parameter or a layer of timm's as its scale."""

    def __init__(self, kind="parameter", dim=12):
        super().__init__()
        self.first, self.second = nn.Linear(dim, 20), nn.Linear(20, dim)
        self.kind, self.gamma = kind, nn.Parameter(torch.randn(dim))
        if kind == "layer":
            layers = pytest.importorskip("timm.layers.layer_scale")
            self.scale = layers.LayerScale(dim, 0.3)

    def forward(self, x):
        branch = self.second(torch.tanh(self.first(x)))
        if self.kind == "layer":
            return x + self.scale(branch)
        if self.kind == "into the shortcut":
            x = x * 1
            x += self.gamma * branch
            return x
        if self.kind == "read twice":
            scaled = self.gamma * branch
            return x + scaled, scaled
        if self.kind == "two scales":
            return x + self.gamma * (self.gamma * branch)
        return x + branch * self.gamma


def images(device="cpu"):
    x = torch.randn(4, 16, 7, 6, device=device)
    return x.contiguous(memory_format=torch.channels_last)


def rows(device="cpu"):
    return torch.randn(3, 5, 12, device=device)


def names(output):
    """Of all nodes of its graph."""
    found, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in found:
            continue
        found.add(node)
        todo += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


def results(model, x, autocast=None, seed=3):
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    with torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    gradients = torch.autograd.grad(y.square().sum(), (x, *model.parameters()), allow_unused=True)
    return [y, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("make", [cn_block, timm_block])
@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_block_agrees_with_native(make, drop, train, autocast, device):
    torch.manual_seed(0)
    model = make(drop=drop).to(device).train(train)
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = swap(model, fuse=True)
    assert "layer_scale_add" in str(report)
    x = images(device)
    torch.manual_seed(3)
    mine = results(model, x, autocast)
    assert NODE in names(mine[0])
    assert (CAST in names(mine[0])) == (autocast is not None)
    theirs = results(native, x, autocast)
    # The factors of stochastic depth are drawn in the dtype of the branch, so float64 draws others.
    if drop == 0 or not train:
        for m, t, e in zip(mine, theirs, results(exact, x.double()), strict=True):
            assert (m.dtype, m.shape) == (t.dtype, t.shape)
            assert_as_good_as_native(m, t, e)
    else:
        tolerance = 1e-4 if autocast is None else 0.1
        for m, t in zip(mine, theirs, strict=True):
            torch.testing.assert_close(m, t, rtol=tolerance, atol=tolerance * t.abs().max().item())


@pytest.mark.parametrize("kind", ["parameter", "layer"])
def test_user_block(kind, device):
    torch.manual_seed(0)
    model = Tokens(kind).to(device)
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    swap(model, fuse=True)
    x = rows(device)
    mine = results(model, x)
    assert NODE in names(mine[0])
    for m, t, e in zip(mine, results(native, x), results(exact, x.double()), strict=True):
        assert_as_good_as_native(m, t, e)


@pytest.mark.parametrize("kind", ["into the shortcut", "read twice"])
def test_left_as_it_is(kind):
    model = Tokens(kind)
    assert "layer_scale_add" not in str(swap(model, fuse=True))
    assert NODE not in names(results(model, rows())[0])


def test_only_the_outer_product_is_joined():
    torch.manual_seed(0)
    model = Tokens("two scales")
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    for m, t in zip(results(model, rows()), results(native, rows()), strict=True):
        assert m.shape == t.shape


def test_16_bit_norm_is_not_cast():
    """Autocast casts the norm's 16-bit input to float32, and its result back."""
    model = cn_block()
    swap(model, fuse=True)
    x = images().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    node, casts = y.grad_fn, 0
    while node is not None and "Conv2d" not in node.name():
        casts += "ToCopy" in node.name()
        node = node.next_functions[0][0] if node.next_functions else None
    assert node is not None
    assert casts == 0


def test_a_hook_on_stochastic_depth_runs():
    model = cn_block(drop=0.5)
    swap(model, fuse=True)
    calls = []
    handle = model.stochastic_depth.register_forward_hook(lambda *_: calls.append(1))
    assert NODE not in names(results(model, images())[0])
    assert calls == [1]
    handle.remove()
    assert NODE in names(results(model, images())[0])


def test_shapes_that_the_op_does_not_take():
    """Native broadcasts."""
    torch.manual_seed(0)
    model = Tokens()
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    for scale in (torch.randn(1), torch.randn(5, 12)):
        for m in (model, native):
            m.gamma = nn.Parameter(scale.clone())
        x = rows()
        for m, t in zip(results(model, x), results(native, x), strict=True):
            torch.testing.assert_close(m, t)


def test_copies_pickles_and_unswap():
    torch.manual_seed(0)
    model = cn_block(drop=0.5)
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    x = images()
    expected = results(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert NODE in names(results(twin, x)[0])
        for m, t in zip(results(twin, x), expected, strict=True):
            torch.testing.assert_close(m, t)
    unswap(model)
    assert type(model) is type(native)
    for m, t in zip(results(model, x), results(native, x), strict=True):
        torch.testing.assert_close(m, t)


def test_compiles_in_one_graph():
    torch.manual_seed(0)
    model = cn_block()
    swap(model, fuse=True)
    x = images()
    expected = results(model, x, torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x.requires_grad_())
    torch.testing.assert_close(y, expected[0], rtol=0.02, atol=0.05)


# ---- the cast and the shortcut ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1000), (2, 8, 5, 3), (0, 4)], ids=str)
def test_cast_with_residual(dtype, shape, device):
    op = torch.ops.warpwright.cast_with_residual
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, requires_grad=True)
    residual, cast = op(x, dtype)
    assert (residual.dtype, cast.dtype) == (torch.float32, dtype)
    assert residual.data_ptr() == x.data_ptr()
    wide, narrow = torch.randn_like(x), torch.randn(shape, device=device).to(dtype)
    (both,) = torch.autograd.grad((residual, cast), x, (wide, narrow))
    torch.testing.assert_close(both, wide + narrow, rtol=0, atol=0)
    for outputs, gradients, expected in (
        (lambda: op(x, dtype)[0], wide, wide),
        (lambda: op(x, dtype)[1], narrow, narrow.float()),
    ):
        (found,) = torch.autograd.grad(outputs(), x, gradients)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_cast_with_residual_further(device):
    """Views off 16 bytes, other orders of memory, second derivatives, a write to the residual."""
    op = torch.ops.warpwright.cast_with_residual
    x = torch.randn(33, device=device)[1:].requires_grad_()
    residual, cast = op(x, torch.bfloat16)
    y = (residual.square() + cast.float() ** 3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 2 + 6 * x.detach(), rtol=0.02, atol=0.05)
    image = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    image.requires_grad_()
    residual, cast = op(image, torch.bfloat16)
    mixed = torch.autograd.grad((residual.sum() + (cast * 2).float().sum()), image)[0]
    torch.testing.assert_close(mixed, torch.full_like(image, 3))
    with torch.no_grad():
        residual, cast = op(image, torch.bfloat16)
    assert cast.grad_fn is None
    with pytest.raises(RuntimeError, match="expected floating point types, got Int"):
        op(torch.ones(3, dtype=torch.int32), torch.bfloat16)


def test_report_names_stochastic_depth():
    report = swap(cn_block(drop=0.5), fuse=True)
    (entry,) = (e for e in report.entries if "stochastic_depth" in e.name)
    assert entry.reason == "runs as a part of layer_scale_add"
