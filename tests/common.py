"""What every op's test needs: layouts, subsets of inputs, registration checks."""

import itertools

import torch
from torch.utils._pytree import tree_map

OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def layouts(x):
    """(name, tensor) pairs with the values of `x` in memory layouts that users make."""
    yield "contiguous", x.contiguous()
    for offset in (1, 3):  # an aligned base, a misaligned view
        storage = x.new_empty(x.numel() + offset)
        view = storage[offset:].view(x.shape)
        view.copy_(x)
        yield f"offset{offset}", view
    if x.dim() == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
    if x.dim() >= 2:
        yield "transposed", x.transpose(-1, -2).contiguous().transpose(-1, -2)
        wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        yield "strided", wide[..., ::2]


def subsets(n):
    """Every non-empty choice of n flags."""
    return [flags for flags in itertools.product([False, True], repeat=n) if any(flags)]


def opcheck(op, args, kwargs=None):
    """All five tests of torch.library.opcheck; any failure raises."""
    torch.library.opcheck(op, args, kwargs or {}, test_utils=OPCHECK_TESTS)


def gradcheck(function, inputs, *, forward_ad=True, second_order=True):
    """gradcheck and gradgradcheck in float64, exact repeatability demanded (nondet_tol=0)."""
    assert torch.autograd.gradcheck(
        function,
        inputs,
        nondet_tol=0.0,
        check_forward_ad=forward_ad,
        check_batched_grad=True,
        check_undefined_grad=True,
    )
    if second_order:
        assert torch.autograd.gradgradcheck(
            function, inputs, nondet_tol=0.0, check_fwd_over_rev=forward_ad
        )


def assert_no_leak(function, *inputs):
    """The output's memory goes with the output: no cycle between it and its autograd node."""
    storage = function(*inputs).untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def clone_inputs(value):
    """Detached copies that keep strides and requires_grad."""

    def clone(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(clone, value)
