"""Which modules are worth a trace, for ``swap(fuse=True)``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from .. import nn as ours
from .blocks import base_of
from .patterns import CONVOLUTIONS, KINDS, NAMES, PATTERNS

# Names in a forward that takes q, k and v apart.
CATS = ("cat", "concat", "concatenate")
ATTENTION = ("unbind", "scaled_dot_product_attention", "softmax", "matmul")
UPSAMPLING = (nn.ConvTranspose2d, ours.ConvTranspose2d)
# Functions that a forward calls, and the method that may be a pool (`functions`).
FUNCTIONS = ("scaled_dot_product_attention", "adaptive_avg_pool2d", "mean")
NORMS = (nn.LayerNorm, nn.RMSNorm)


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module``'s forward is a user's, or that of ``nn.Sequential``."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule) or base_of(kind) is not None:
        return False
    forward = getattr(kind.forward, "__module__", "") or ""
    return forward.partition(".")[0] != "torch" or kind.forward is nn.Sequential.forward


def may_be_rewritten(module: nn.Module) -> bool:
    """Whether ``module``'s forward may call a norm or a convolution next to a shortcut, concatenate with
    a transposed convolution, scale a branch by a parameter, call attention or a mean, or take views
    apart after a permutation."""
    if not has_own_forward(module):
        return False
    if any(isinstance(m, NORMS) for m in _called_by(module)):
        return True
    if any(type(m) in CONVOLUTIONS for m in _called_by(module)):
        return not isinstance(module, nn.Sequential)
    if any(p is not None for p in module._parameters.values()) and [*module.children()]:
        return True
    names = names_in(type(module))
    if not names.isdisjoint(CATS) and any(type(m) in UPSAMPLING for m in _called_by(module)):
        return True
    if not names.isdisjoint(FUNCTIONS):
        return True
    return "permute" in names and not names.isdisjoint(ATTENTION)


def may_have_chains(module: nn.Module) -> bool:
    """Whether ``module``'s forward may contain a chain, so that a trace can pay."""
    if not has_own_forward(module):
        return False
    called = {KINDS[type(m)].op for m in _called_by(module) if type(m) in KINDS}
    called |= {NAMES[name] for name in names_in(type(module)) if name in NAMES} | {"add"}
    if "batch_norm" in called and any(type(m) in CONVOLUTIONS for m in _called_by(module)):
        return True
    return any(called.issuperset(pattern.ops) for pattern in PATTERNS)


def _called_by(module: nn.Module) -> Iterator[nn.Module]:
    """The children, including those of lists and dicts, which have no forward."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_by(child)
        else:
            yield child


def names_in(kind: type) -> set[str]:
    functions = (f for base in kind.__mro__ if base is not nn.Module for f in vars(base).values())
    return {
        name for f in functions for name in getattr(getattr(f, "__code__", None), "co_names", ())
    }
