"""On a GPU: each kernel variant gives the same bits every time, beside a busy stream.

The variants are the cases of tools/sanitize_cases.py. tests/test_stress.py has larger ones.
"""

import sys
from pathlib import Path

import pytest
import torch
from repeats import differing_repeats, differing_replays

import warpwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from sanitize_cases import CASES, DTYPES, WITHOUT_FLOAT64

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TF32 = ("linear", "linear_activation", "conv2d", "attention")


def kinds():
    """(op, dtype, arithmetic)"""
    for op in CASES:
        for dtype in DTYPES:
            if dtype != torch.float64 or op not in WITHOUT_FLOAT64:
                yield op, dtype, "ieee"
    for op in TF32:
        yield op, torch.float32, "tf32"
        yield op, torch.float32, "3xtf32"


def step_of(function, args, kwargs, dtype):
    """Output and gradients of a case on the GPU, as a function without arguments."""
    moved = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_floating_point():
            moved.append(arg.to(dtype).cuda().requires_grad_())
        else:
            moved.append(arg.cuda() if isinstance(arg, torch.Tensor) else arg)
    leaves = [t for t in moved if isinstance(t, torch.Tensor) and t.requires_grad]
    output = function(*moved, **kwargs)
    cotangent = torch.randn_like(output)

    def step():
        output = function(*moved, **kwargs)
        found = [output.detach()]
        if output.requires_grad:
            found += torch.autograd.grad(output, leaves, cotangent, allow_unused=True)
        return [t for t in found if t is not None]

    return step


@pytest.mark.parametrize(("op", "dtype", "arithmetic"), kinds(), ids=str)
def test_repeats_of_kernel_variants(op, dtype, arithmetic):
    if arithmetic == "tf32":  # off again before the next test: conftest.py
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    elif arithmetic == "3xtf32":
        warpwright.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    wrong = {}
    for case, function, args, kwargs in CASES[op]():
        step = step_of(function, args, kwargs, dtype)
        first = [t.clone() for t in step()]
        found = differing_replays(step, first)
        if found is None:
            found = differing_repeats(step, first)
        if found:
            wrong[case] = found
    assert not wrong
