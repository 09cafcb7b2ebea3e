"""What the tests of swap(fuse=True) share: a block with any forward, and what a report says."""

from torch import nn

import warpwright


class Block(nn.Module):
    """conv → BN → ReLU; the tests give it other forwards."""

    def __init__(self, forward=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.between = nn.Identity()
        self.up, self.gelu, self.out = nn.Linear(11, 8), nn.GELU(), nn.Linear(8, 5)
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.rate = 0.5
        self.kept = []
        if forward is not None:
            self.__class__ = type("Block", (Block,), {"forward": forward, "__module__": __name__})

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def with_forward(forward):
    return Block(forward)


def fused(report):
    return [(f.block, f.chain, f.into) for f in report.fusions if not f.reason]


def left(report):
    return [(f.block, f.chain, f.reason) for f in report.fusions if f.reason]


def count_calls(monkeypatch):
    """The names of our functionals, in the order in which they are called from now on."""
    names = []

    def counted(name):
        function = getattr(warpwright.functional, name)

        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(warpwright.functional, name, call)

    for name in (
        "relu",
        "batch_norm",
        "batch_norm_relu",
        "batch_norm_add_relu",
        "batch_norm_relu_max_pool2d",
    ):
        counted(name)
    return names
