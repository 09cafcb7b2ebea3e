"""Attention's operands, and the comparison with native's backend that can take them."""

from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwright.functional as F
from warpwright.testing import compare_with_native


def native(query, key, value, mask=None, **kwargs):
    # Native's fused CPU kernel issues AMX instructions for 16-bit types wherever the CPU lists
    # them, and dies where the system does not allow them. On CUDA the fused backends refuse some
    # masks, read others at misaligned addresses and give NaN for logits far from 0; they check the
    # head dimension, not strides and addresses, and find "no kernel to launch" for float32.
    attention = torch.nn.functional.scaled_dot_product_attention
    if query.device.type == "cpu":
        by_formula = query.dtype in (torch.bfloat16, torch.float16)
    else:
        strict = query.dtype == torch.float32 and not all(map(aligned, (query, key, value)))
        by_formula = mask is not None or strict
    with sdpa_kernel(SDPBackend.MATH) if by_formula else nullcontext():
        return attention(query, key, value, mask, **kwargs)


def aligned(x):
    """Every row of the last dimension starts at a multiple of 16 bytes and has no gaps."""
    offsets = (x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(n * x.element_size() % 16 == 0 for n in offsets)


ours = F.scaled_dot_product_attention


def contiguous(function):
    """Native's backends differ in memory order; test_strides compares it, the others values."""

    def run(*args, **kwargs):
        return function(*args, **kwargs).clone(memory_format=torch.contiguous_format)

    return run


def compare(inputs, **kwargs):
    if inputs[0].dtype == torch.float64:  # native is the oracle: there is no error of its own
        leaves = [t for t in inputs if t.requires_grad]
        results = [f(*inputs, **kwargs) for f in (ours, native)]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        if leaves:
            grads = [torch.autograd.grad(y, leaves, results[1].detach().cos()) for y in results]
            torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)
        return
    # The largest error of one draw scatters: test_errors_over_draws has the strict factor.
    compare_with_native(contiguous(ours), contiguous(native), inputs, kwargs, factor=3)


def make(device, dtype, *shape):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def qkv(device, dtype, B=2, H=4, S_q=5, S_k=7, D=8, D_v=None, H_kv=None):
    H_kv = H_kv or H
    return (
        make(device, dtype, B, H, S_q, D),
        make(device, dtype, B, H_kv, S_k, D),
        make(device, dtype, B, H_kv, S_k, D_v or D),
    )


def seeded(seed, function):
    def run(*args, **kwargs):
        torch.manual_seed(seed)
        return function(*args, **kwargs)

    return run
