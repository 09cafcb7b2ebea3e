"""The CPU's loops for AVX2 and for AVX-512 (csrc/cpu/capability.h) give the same bits."""

import os
import subprocess
import sys

import pytest
import torch

import warpwright.functional as F
from warpwright.testing import assert_same

OPS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "swiglu": F.swiglu,
    "geglu": F.geglu,
    "dropout": lambda x: F.dropout(x, 0.3),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax_columns": lambda x: F.softmax(x, 1 - x.dim()),
    "log_softmax_columns": lambda x: F.log_softmax(x, 1 - x.dim()),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], factors(x), factors(x)),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, x.shape[1] // 2 if x.shape[1] % 2 == 0 else 3),
    "cross_entropy": lambda x: losses(x, labels(x)),
    "cross_entropy_smoothed": lambda x: losses(x, labels(x), label_smoothing=0.1),
    "cross_entropy_probabilities": lambda x: losses(x, torch.rand_like(x), label_smoothing=0.1),
}
CHANNELS_LAST = ("dropout", "group_norm")
# Some whole vectors and a rest of each length, planes and channels_last.
SHAPES = ((2, 100_006), (3, 38), (19, 74), (2, 3, 7, 10), (3, 66, 5, 4))


def factors(x):
    """A factor per column, by which x gets a gradient, too."""
    return x.flatten()[: x.shape[-1]]


def labels(x):
    return torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]))


def losses(x, target, **options):
    """One for each row, lest the rows with NaN hide the others."""
    weight = torch.rand(x.shape[1], dtype=x.dtype)
    return F.cross_entropy(x, target, weight, reduction="none", **options)


def results():
    """Values and gradients of all ops. float64 calls functions of a library, which differ."""
    found = []
    for name, op in OPS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for shape in SHAPES:
                torch.manual_seed(len(found))
                x = (4 * torch.randn(shape)).to(dtype)
                x.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), -0.0]).to(dtype)
                if len(shape) == 4 and name in CHANNELS_LAST:
                    x = x.to(memory_format=torch.channels_last)
                x.requires_grad_()
                y = op(x)
                (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
                found += [y.detach(), gradient]
    return found


def test_bits(tmp_path):
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this CPU runs one of the two alone")
    saved = tmp_path / "results.pt"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, __file__, str(saved)], env=environment, check=True)
    assert_same(torch.load(saved), results())


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
