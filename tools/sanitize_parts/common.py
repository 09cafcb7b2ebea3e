"""Operands, and where the cases run."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def misaligned(x):
    """The same values one element past an aligned address."""
    base = x.new_empty(x.numel() + 1)
    return base[1:].view(x.shape).copy_(x)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def integers(*shape):
    return torch.randint(-3, 4, shape).double()
