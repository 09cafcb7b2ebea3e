"""What the explainers share: operands in the form that the choice functions take."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from . import _C
from ._arch import built_archs

Lines = list[tuple[str, str]]
Arguments = dict[str, Any]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def operand_of(tensor: Tensor) -> _C.Operand:
    # A tensor of another device counts as one that starts where allocations start.
    address = tensor.data_ptr() if tensor.is_cuda else 0
    return _C.Operand(tensor.shape, tensor.stride(), address)


def pair_of(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return pair if len(pair) == 2 else (pair[0], pair[0])


def has_rows(x: Tensor) -> bool:
    """Whether the channels of a pixel are adjacent: rows of channels."""
    return suggest_memory_format(x) in (torch.channels_last, torch.channels_last_3d)


def may_take_sm90() -> bool:
    built = not built_archs() or any(arch.startswith("9.0a") for arch in built_archs())
    return built and os.environ.get("WARPWRIGHT_PATH") != "portable"
