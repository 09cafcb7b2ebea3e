"""swap(fuse=True): ``torch.cat([skip, up(x)], 1)`` of decoders as one op."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import warpwright
from warpwright import swap
from warpwright._ops import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "models"))
from unet import UNet


class Up(nn.Module):
    """A decoder's block: the order and the way of the call are attributes."""

    def __init__(self, form="first", channels=8):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.norm = nn.GroupNorm(2, channels)
        self.form = form

    def forward(self, x, skip):
        if self.form == "first":
            return self.norm(torch.cat([skip, self.up(x)], 1))
        if self.form == "last":
            return self.norm(torch.cat((self.up(x), skip), dim=1))
        if self.form == "keywords":
            y = self.up(x)
            return self.norm(torch.concat(tensors=[skip, y], dim=-3))
        if self.form == "rows":
            return torch.cat([skip, self.up(x)], 2)
        if self.form == "read twice":
            y = self.up(x)
            return self.norm(torch.cat([skip, y], 1)) + y.mean()
        if self.form == "three":
            return self.norm(torch.cat([skip[:, :2], self.up(x), skip[:, 2:]], 1))
        if self.form == "sized":
            return self.norm(torch.cat([skip, self.up(x, [8, 8])], 1))
        y = self.up(x)  # written
        skip = skip.mul_(2)
        return self.norm(torch.cat([skip, y], 1))


def called(run):
    """The operators of ours that `run` reaches, by name."""

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    log = Log()
    with log:
        run()
    return {name.removeprefix("warpwright::") for name in log.names if "warpwright" in name}


def operands(device="cpu", dtype=torch.float32, layout=torch.channels_last):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, 4).to(device, dtype, memory_format=layout)
    skip = torch.randn(2, 4, 8, 8).to(device, dtype, memory_format=layout)
    return x.requires_grad_(), skip.requires_grad_()


def results(model, *inputs):
    y = model(*inputs)
    leaves = [*inputs, *model.parameters()]
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, leaves, torch.randn_like(y))]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", ["first", "last", "keywords"])
def test_fused(device, form, layout):
    model = Up(form).to(device)
    inputs = operands(device, layout=layout)
    expected = results(model, *inputs)
    report = swap(model, fuse=True, exclude=["norm"])  # whose strides native chooses by device
    assert [(f.chain, f.into) for f in report.fusions] == [("up → cat", "conv_transpose2d_cat")]
    assert "conv_transpose2d_cat" in called(lambda: model(*inputs))
    for ours, theirs in zip(results(model, *inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    warpwright.unswap(model)
    assert type(model) is Up
    torch.testing.assert_close(results(model, *inputs), expected)


@pytest.mark.parametrize("form", ["rows", "read twice", "three", "sized", "written"])
def test_left(device, form):
    model = Up(form).to(device)
    x, skip = operands(device)
    expected = model(x, skip.detach().clone())
    report = swap(model, fuse=True)
    assert not any(f.into == "conv_transpose2d_cat" for f in report.fusions)
    assert "conv_transpose2d_cat" not in called(lambda: model(x, skip.detach().clone()))
    torch.testing.assert_close(model(x, skip.detach().clone()), expected)


def test_left_by_choice(device):
    inputs = operands(device)
    for options in ({"ops": {"group_norm"}}, {"exclude": ["up"]}):
        model = Up().to(device)
        report = swap(model, fuse=True, **options)
        assert not any(f.into == "conv_transpose2d_cat" for f in report.fusions)
        assert not {"conv_transpose2d_cat", "conv_transpose2d"} & called(lambda m=model: m(*inputs))


def test_a_hook_on_the_layer_sees_its_output(device):
    inputs = operands(device)
    model = Up().to(device)
    seen = []
    model.up.register_forward_hook(lambda layer, args, output: seen.append(output.shape))
    report = swap(model, fuse=True)
    assert not any(f.into == "conv_transpose2d_cat" for f in report.fusions)
    model(*inputs)
    assert seen == [(2, 4, 8, 8)]
    # One that comes later.
    model = Up().to(device)
    swap(model, fuse=True)
    assert "conv_transpose2d_cat" in called(lambda: model(*inputs))
    handle = model.up.register_forward_hook(lambda *_: seen.append("again"))
    assert "conv_transpose2d_cat" not in called(lambda: model(*inputs))
    assert seen[-1] == "again"
    handle.remove()
    assert "conv_transpose2d_cat" in called(lambda: model(*inputs))


def test_other_inputs_run_one_by_one(device):
    """Subclasses and unbatched images; skips of other dtypes promote."""
    model, native = Up().to(device), Up().to(device)
    native.load_state_dict(model.state_dict())
    swap(model, fuse=True)
    x, skip = operands(device)
    with pytest.raises(RuntimeError, match="skip: expected the shape of the transposed"):
        model(x, skip[..., :6])
    model.norm, native.norm = nn.Identity(), nn.Identity()
    swap(model, fuse=True)
    torch.testing.assert_close(model(x, skip.double()), native(x, skip.double()))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(device, low):
    native = Up().to(device)
    model = copy.deepcopy(native)
    swap(model, fuse=True)
    x, skip = operands(device)
    for kept in (skip, skip.detach().to(low).requires_grad_()):
        with torch.autocast(device, dtype=low):
            ours, theirs = (torch.cat([m(x, kept)]) for m in (model, native))
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
        ours.float().sum().backward()
        assert model.up.weight.grad.dtype == torch.float32


def test_unet(device):
    torch.manual_seed(0)
    model = UNet(8).to(device).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    native = copy.deepcopy(model)
    report = swap(model, fuse=True)
    chains = [f.chain for f in report.fusions if f.into == "conv_transpose2d_cat"]
    assert chains == ["up.0 → cat", "up.1 → cat", "up.2 → cat"]
    y, expected = model(x), native(x)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)
    cotangent = torch.randn_like(y)
    ours = torch.autograd.grad(y, [*model.parameters()], cotangent)
    theirs = torch.autograd.grad(expected, [*native.parameters()], cotangent)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
    again = pickle.loads(pickle.dumps(model))
    assert "conv_transpose2d_cat" in called(lambda: again(x))
    model.eval(), native.eval()
    torch.testing.assert_close(model(x), native(x), rtol=1e-3, atol=1e-4)


def test_compiled(device):
    model = Up().to(device)
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    inputs = operands(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), native(*inputs))
    assert ops.conv_transpose2d_cat is not None
