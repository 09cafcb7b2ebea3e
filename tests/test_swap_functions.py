"""swap(fuse=True) and attention that a forward calls as a function."""

import copy

import pytest
import torch
from sharded import nodes
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

import warpwright
from warpwright import swap, unswap
from warpwright.testing import assert_same

CHAIN = "F.scaled_dot_product_attention"


class Attention(nn.Module):
    """Of 2 heads; ``masked``: two calls, the second with a mask and dropout's argument."""

    def __init__(self, masked=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.masked = masked

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.masked:
            y = y + F.scaled_dot_product_attention(q, k, v, x.new_zeros(5, 5), dropout_p=0.0)
        return y.transpose(1, 2).flatten(2)


def data():
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def fused(report):
    return [f.chain for f in report.fusions if not f.reason]


def attention_nodes(out):
    return sorted(name for name in nodes(out) if "Attention" in name)


@pytest.mark.parametrize("masked", [False, True])
def test_runs_on_ours(masked):
    """With the bits that patch() gives, and as native's."""
    model = Attention(masked)
    native, patched = copy.deepcopy(model), copy.deepcopy(model)
    assert CHAIN in fused(swap(model, fuse=True))
    swap(patched)
    x = data()
    out = model(x)
    assert attention_nodes(out) == ["WarpwrightAttentionBackward"]
    with warpwright.patch():
        assert_same(out, patched(x))
    torch.testing.assert_close(out, native(x))
    (mine,) = torch.autograd.grad(out.square().sum(), x)
    (theirs,) = torch.autograd.grad(native(x).square().sum(), x)
    torch.testing.assert_close(mine, theirs)


def test_comes_undone():
    model = Attention()
    swap(model, fuse=True)
    unswap(model)
    assert type(model) is Attention
    assert "WarpwrightAttentionBackward" not in attention_nodes(model(data()))


@pytest.mark.parametrize(
    "options", [{"fuse": False}, {"ops": ["linear"]}, {"exclude": Attention}], ids=str
)
def test_stays_native(options):
    model = nn.Sequential(Attention(), nn.Linear(16, 4))
    report = swap(model, **{"fuse": True, **options})
    assert CHAIN not in fused(report)
    assert "WarpwrightAttentionBackward" not in attention_nodes(model(data()))


def test_a_hook_on_the_module_stays():
    model, seen = Attention(), []
    swap(model, fuse=True)
    model.register_forward_hook(lambda *args: seen.append(args[2].shape))
    model(data())
    assert seen == [(3, 5, 16)]


def test_compile():
    torch.compiler.reset()
    model = Attention()
    swap(model, fuse=True)
    x = data()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
