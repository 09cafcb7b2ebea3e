"""timm's norms and attention on our ops."""

import copy
import pickle

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from timm.layers import BatchNormAct2d, LayerNorm, LayerNorm2d, set_fast_norm  # noqa: E402
from timm.models.vision_transformer import Attention  # noqa: E402

from warpwright import swap, unswap  # noqa: E402
from warpwright.testing import assert_as_good_as_native, assert_same  # noqa: E402


def vision_transformer(device, **options):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return timm.models.VisionTransformer(**sizes, num_classes=5, **options).to(device)


def differentiated(module, x, **kwargs):
    """The output, then the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    output = module(x, **kwargs)
    leaves = [x, *module.parameters()]
    return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def assert_as_good(mine, native, x, **kwargs):
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
             for k, v in kwargs.items()}  # fmt: skip
    found, theirs = differentiated(mine, x, **kwargs), differentiated(native, x, **kwargs)
    truth = differentiated(copy.deepcopy(native).double(), x.double(), **exact)
    for a, b, e in zip(found, theirs, truth, strict=True):
        assert_as_good_as_native(a, b, e, factor=3)


@pytest.mark.parametrize("fuse", [False, True])
def test_vision_transformer(device, fuse):
    native = vision_transformer(device)
    mine = copy.deepcopy(native)
    x = torch.randn(2, 3, 32, 32, device=device)
    report = swap(mine, fuse=fuse, check=x)
    swapped = {entry.type.rsplit(".", 1)[-1] for entry in report.swapped}
    assert swapped == {"Conv2d", "LayerNorm", "Attention", "Linear", "GELU"}
    assert_as_good(mine, native, x)
    for other in (copy.deepcopy(mine), *([] if fuse else [pickle.loads(pickle.dumps(mine))])):
        assert type(other.blocks[0].attn) is type(mine.blocks[0].attn)
        assert_same(other(x), mine(x))
    assert unswap(mine) == len(report.swapped)
    assert type(mine.blocks[0].attn) is Attention
    assert_same(mine(x), native(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "norm_layer": LayerNorm}])
def test_attention(device, dtype, options):
    native = Attention(48, num_heads=3, qkv_bias=True, **options).to(device, dtype)
    mine = nn.ModuleList([copy.deepcopy(native)])
    swap(mine)
    assert type(mine[0]) is not Attention
    x = torch.randn(2, 7, 48, device=device).to(dtype)
    assert_as_good(mine[0], native, x)
    mask = torch.rand(7, 7, device=device) < 0.7
    mask.fill_diagonal_(True)
    assert_as_good(mine[0], native, x, attn_mask=mask)
    assert_as_good(mine[0], native, x, is_causal=True)
    for module in (mine[0], native):
        module.fused_attn = False
    assert_as_good(mine[0], native, x)


def test_attention_transposes_nothing_in_its_backward():
    """Attention's backward writes the gradient of the product."""
    mine = nn.ModuleList([Attention(48, num_heads=3)])
    swap(mine)
    x = torch.randn(2, 7, 48, requires_grad=True)
    nodes, seen = [mine[0](x).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    names = {node.name() for node in seen}
    assert "WarpwrightSplitQkvBackward" in names
    assert not names & {"SplitBackward0", "UnbindBackward0", "StackBackward0", "CloneBackward0"}


@pytest.mark.parametrize("kind", [LayerNorm, LayerNorm2d])
@pytest.mark.parametrize("autocast", [False, True])
def test_norms(device, kind, autocast):
    native = kind(24).to(device)
    for parameter in native.parameters():
        nn.init.normal_(parameter)
    mine = nn.Sequential(copy.deepcopy(native))
    swap(mine)
    assert type(mine[0]) is not kind
    x = torch.randn((5, 24) if kind is LayerNorm else (2, 24, 3, 5), device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        assert_as_good(mine, nn.Sequential(native), x)


def test_fast_norm_stays_timms(device):
    set_fast_norm(True)
    try:
        native = LayerNorm(24).to(device)
    finally:
        set_fast_norm(False)
    mine = nn.Sequential(copy.deepcopy(native))
    swap(mine)
    x = torch.randn(5, 24, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(mine(x), native(x))


def test_convnext(device):
    native = timm.models.ConvNeXt(depths=(1,) * 4, dims=(8, 16, 16, 16), num_classes=5)
    native = native.to(device).eval()
    mine = copy.deepcopy(native)
    x = torch.randn(2, 3, 32, 32, device=device)
    report = swap(mine, check=x)
    assert {"LayerNorm", "LayerNorm2d"} <= {e.type.rsplit(".", 1)[-1] for e in report.swapped}


def test_compiled(device):
    mine = vision_transformer(device)
    x = torch.randn(2, 3, 32, 32, device=device)
    swap(mine)
    expected = mine(x)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("act", [nn.SiLU, nn.Hardswish, nn.ReLU, nn.Identity, nn.GELU])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_act(device, act, momentum):
    """Batch norm and its activation as one layer; with an activation that has no fused form, timm's."""
    native = BatchNormAct2d(6, act_layer=act, momentum=momentum).to(device)
    nn.init.normal_(native.weight)
    nn.init.normal_(native.bias)
    mine = nn.Sequential(copy.deepcopy(native))
    report = swap(mine)
    assert [entry.reason for entry in report.swapped] == [""]
    for training in (True, True, False):
        native.train(training)
        mine.train(training)
        assert_as_good(mine[0], native, torch.randn(3, 6, 5, 4, device=device))
        assert torch.equal(mine[0].num_batches_tracked, native.num_batches_tracked)
    assert type(pickle.loads(pickle.dumps(mine))[0]) is type(mine[0])
    seen = []
    mine[0].act.register_forward_hook(lambda *_: seen.append(1))  # watched, so it is called
    mine(torch.randn(3, 6, 5, 4, device=device))
    assert seen
    unswap(mine)
    assert type(mine[0]) is BatchNormAct2d
