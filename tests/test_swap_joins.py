"""swap(fuse=True) in residual blocks: which shortcuts hand their gradient to a convolution."""

import copy

import pytest
import torch
from torch import nn

from warpwright import swap, unswap
from warpwright.swap.joins import JOINS
from warpwright.testing import assert_as_good_as_native

CHANNELS_LAST = torch.channels_last


class Basic(nn.Module):
    """torchvision's BasicBlock in its lines; widths and strides of a test."""

    def __init__(self, c=4, k=4, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(c, k, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(k), nn.BatchNorm2d(k)
        self.conv2 = nn.Conv2d(k, k, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or c != k:
            shortcut = nn.Conv2d(c, k, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(k))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ShortcutFirst(Basic):
    """The shortcut's convolution comes first, and adds the gradient of the other branch."""

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + identity)


class Plain(Basic):
    """No norms: no chain of its own."""

    def forward(self, x):
        return self.conv2(self.relu(self.conv1(x))) + x


class Writes(Basic):
    """The activation may write into the input."""

    def forward(self, x):
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.relu(x)


class Apart(Basic):
    """The two never meet."""

    def forward(self, x):
        return self.bn1(self.conv1(x)), self.bn2(self.conv2(x))


class CountedJoins:
    """The nodes with a skip below an output."""

    def __init__(self, output):
        self.names, seen, todo = [], set(), [output.grad_fn]
        while todo:
            node = todo.pop()
            for function, number in node.next_functions:
                if function is None or (function, number) in seen:
                    continue
                seen.add((function, number))
                todo.append(function)
                own = {"WarpwrightConv2dBackward": 1, "WarpwrightConv2DBatchNormBackward": 2}
                if number >= own.get(function.name(), 99):
                    self.names.append(function)


BLOCKS = {
    "identity": (Basic, (4, 4, 1), 1),
    "downsample": (Basic, (4, 6, 2), 1),
    "shortcut_first": (ShortcutFirst, (4, 6, 2), 1),
    "identity_first": (ShortcutFirst, (4, 4, 1), 1),
    "no_norms": (Plain, (4, 4, 1), 1),
}


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("training", [True, False])
def test_swap(device, case, training):
    kind, sizes, joins = BLOCKS[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(*sizes)).to(device).double().train(training)
    native = copy.deepcopy(model)
    report = swap(model, fuse=True)
    x = torch.randn(2, 3, 8, 8, device=device, dtype=torch.float64)
    out, expected = model(x), native(x)
    assert len(CountedJoins(out).names) == joins
    assert sum(JOINS in (entry.note or "") for entry in report.entries) == joins
    torch.testing.assert_close(out, expected)
    dy = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, [*model.parameters()], dy, allow_unused=True),
        torch.autograd.grad(expected, [*native.parameters()], dy, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    unswap(model)
    assert not CountedJoins(model(x)).names


def test_writes_to_the_input(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Writes()).to(device)
    report = swap(model, fuse=True)
    assert not any(JOINS in (entry.note or "") for entry in report.entries)
    assert not CountedJoins(model(torch.randn(2, 3, 8, 8, device=device))).names


def test_branches_that_never_meet(device):
    """They may be differentiated one after the other, so nothing is joined."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Apart()).to(device)
    swap(model, fuse=True)
    for part in model(torch.randn(2, 3, 8, 8, device=device)):
        assert not CountedJoins(part).names


def test_hooks_see_the_same_gradients(device):
    def run(fuse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 1), Basic()).to(device).double()
        swap(model, fuse=fuse)
        seen = []
        model[1].register_full_backward_hook(lambda m, gi, go: seen.append(gi[0].clone()))
        model(torch.ones(2, 3, 8, 8, device=device, dtype=torch.float64)).sin().sum().backward()
        return seen

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["identity", "downsample", "shortcut_first"])
def test_swap_under_autocast(case):
    kind, (c, k, stride), _ = BLOCKS[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, c * 16, 1, bias=False), kind(c * 16, k * 16, stride))
    model = model.cuda().to(memory_format=CHANNELS_LAST)
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    x = torch.randn(8, 3, 20, 20, device="cuda").to(memory_format=CHANNELS_LAST)

    def run(model, x, dtype):
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model(x)
        return out, torch.autograd.grad(out.float().square().mean(), [*model.parameters()])

    out, got = run(model, x, torch.bfloat16)
    assert len(CountedJoins(out).names) == 1
    _, theirs = run(native, x, torch.bfloat16)
    _, exact = run(copy.deepcopy(native).double(), x.double(), torch.float64)
    for a, b, e in zip(got, theirs, exact, strict=True):
        assert_as_good_as_native(a, b, e)
