"""Batch norm's shapes and parameters, and the comparison with native's."""

import torch

from warpwright.testing import compare_with_native

# 2-D to 5-D; channels and planes with and without a tail; one channel; more rows than a block; the
# last one small planes that all start alike, whose values a GPU stores one per thread.
SHAPES = [
    (7, 5),
    (2, 5, 3),  # two channels end in the last vector of 16-bit elements
    (16, 64),
    (3, 6, 11),
    (2, 3, 9, 11),
    (4, 32, 8, 8),
    (2, 3, 4, 5, 3),
    (5, 1, 6, 6),
    (6, 8, 7, 7),
    (21, 16, 7, 7),
]
DOUBLE = {"rtol": 1e-10, "atol": 1e-10}
# On a GPU: channels that a block holds, and from the last two on channels that it doesn't.
LARGE = [(64, 40, 14, 14), (1500, 48), (3, 17, 40, 41), (20, 3, 61, 61), (15, 2, 60, 84)]
# In rows: vectors of a row that do not divide a block's threads, so that some threads have no rows.
LARGE += [(300, 24, 9, 9), (33, 72, 10, 11), (9, 144, 12, 12)]
# Rows. The GPU keeps a part of them on chip from the sums to the result: groups of channels for every other
# SM, so that few rows are too many; float32 and, in the second, 16-bit types.
ROWS_IN_PART = [(1700, 2880), (1700, 5760)]
SHORT = [torch.bfloat16, torch.float16]


def parameters(channels, device, dtype):
    """running_mean, running_var, weight, bias."""
    return (
        torch.randn(channels, device=device).to(dtype),
        (torch.rand(channels, device=device) + 0.5).to(dtype),
        torch.randn(channels, device=device).to(dtype),
        torch.randn(channels, device=device).to(dtype),
    )


def compare(ours, reference, args):
    """The error rule; in float64 native is no better an oracle than ours, so a plain tolerance."""
    if args[0].dtype != torch.float64:
        compare_with_native(ours, reference, args)
        return
    leaves = [t for t in args if t is not None and t.requires_grad]
    outputs = [ours(*args), reference(*args)]
    cotangent = torch.randn_like(outputs[1])
    grads = [torch.autograd.grad(output, leaves, cotangent) for output in outputs]
    torch.testing.assert_close((outputs[0], *grads[0]), (outputs[1], *grads[1]), **DOUBLE)
