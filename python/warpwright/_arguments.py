"""Native's conversions and errors for arguments whose type differs from the signature.

The functionals call these functions only for such arguments, or after an error.
"""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

# The dispatcher's message; the whole value follows.
_SCHEMA_ERROR = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)'")
_INT64 = range(-(2**63), 2**63)


def _refuse(function: str, name: str, expected: str, value: Any) -> NoReturn:
    raise TypeError(
        f"{function}(): argument '{name}' must be {expected}, not {type(value).__name__}"
    )


def _is_symbolic(value: Any) -> bool:
    """Whether it is a number of a traced program, which has no value yet."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor)


def integer(function: str, name: str, value: Any) -> Any:
    """Accepts integers of Python and NumPy and tensors of one integer, but no bool."""
    if _is_symbolic(value):
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_floating_point() or value.is_complex():
            _refuse(function, name, "int", value)
        return int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(function, name, "int", value)
    if int(value) not in _INT64:
        raise ValueError(f"{function}(): argument '{name}': Overflow when unpacking long long")
    return operator.index(value)


def integers(function: str, name: str, value: Any) -> Sequence[int]:
    """Accepts one integer for both dimensions, or a list or tuple."""
    if _is_symbolic(value):
        return value
    if not isinstance(value, (tuple, list)):
        one = integer(function, name, value)
        return (one, one)
    if len(value) > 4:  # the operators print the whole value
        raise RuntimeError(
            f"{function}(): expected {name} to be a single integer value or a list of 2 values, "
            f"but got {len(value)}"
        )
    if value and isinstance(value[0], bool):  # native checks the first element only
        _refuse(function, name, "tuple of ints", value[0])
    return [int(v) if v is True or v is False else integer(function, name, v) for v in value]


def sizes(function: str, name: str, value: Any) -> Sequence[int]:
    """Accepts a list or tuple of integers, torch.Size too."""
    if _is_symbolic(value):
        return value
    if not isinstance(value, (tuple, list)):
        _refuse(function, name, "tuple of ints", value)
    found = []
    for place, size in enumerate(value):
        if isinstance(size, bool) and place > 0:  # native checks the first element's type only
            size = int(size)
        whole = _is_symbolic(size) or isinstance(size, (numbers.Integral, Tensor))
        if isinstance(size, bool) or not whole:
            raise TypeError(
                f"{function}(): argument '{name}' must be tuple of ints, but found element of type "
                f"{type(size).__name__} at pos {place}"
            )
        try:
            found.append(integer(function, name, size))
        except ValueError as error:  # beyond int64
            raise TypeError(f"{error} at pos {place}") from None
    return found


def real(function: str, name: str, value: Any) -> Any:
    """Accepts real numbers of Python and NumPy, and 0-d tensors that require no grad."""
    if value.__class__ is float:
        return value
    if _is_symbolic(value):
        return value
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.requires_grad or value.is_complex():
            _refuse(function, name, "float", value)
    elif not isinstance(value, numbers.Real) and type(value).__name__ not in ("bool", "bool_"):
        _refuse(function, name, "float", value)
    return float(value)


def flag(function: str, name: str, value: Any) -> Any:
    """Accepts Python's bool only."""
    if value is True or value is False:
        return value
    if not isinstance(value, bool) and not _is_symbolic(value):
        _refuse(function, name, "bool", value)
    return value


def dtype(function: str, name: str, value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        _refuse(function, name, "torch.dtype", value)
    return value


def error(
    raised: RuntimeError,
    function: str,
    tensors: dict[str, Any],
    optional: dict[str, Any],
    renamed: dict[str, str] | None = None,
) -> Exception:
    """Native's error for `raised`: TypeError if an argument is no tensor.

    The operators accept None for any tensor and fail later. For other types the dispatcher raises
    RuntimeError with the whole value in its message. Sizes are printed whole, too, and cut here.
    `renamed`: how the function says what the operator's message may begin with.
    """
    for name, value in (tensors | optional).items():
        missing = value is None and name in tensors
        if missing or not (value is None or isinstance(value, Tensor) or _is_symbolic(value)):
            return TypeError(
                f"{function}(): argument '{name}' must be Tensor, not {type(value).__name__}"
            )
    found = _SCHEMA_ERROR.search(str(raised))
    if found is None:
        for begin, ours in (renamed or {}).items():
            if str(raised).startswith(begin):
                return type(raised)(ours + str(raised).removeprefix(begin))
        line, _, rest = str(raised).partition("\n")
        return raised if len(line) <= 500 else type(raised)(f"{line[:400]}…\n{rest}")
    expected, name = found.groups()
    if "int" in expected:  # other types than int have been refused before the call
        # Native reads sizes of any number one by one, and calls a failure there one of type.
        kind = TypeError if name == "normalized_shape" else ValueError
        return kind(f"{function}(): argument '{name}': Overflow when unpacking long long")
    return TypeError(f"{function}(): argument '{name}' must be {expected}")


def broadcasting(function: str, **tensors: Tensor) -> None:
    """Raises RuntimeError with the arguments' names if their shapes do not broadcast."""
    shapes = [tensor.shape for tensor in tensors.values()]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        raise RuntimeError(
            f"{function}: {' and '.join(tensors)}: expected shapes that broadcast, got {listed}"
        ) from None


def shown(value: Any) -> str:
    """A refused value for a message, cut: a list may have any length."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def require_storage(function: str, name: str, tensor: Any) -> None:
    """Raises RuntimeError if a plain tensor's elements are not in memory, where native's ops read on."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return
    if tensor.is_nested or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        return
    if (
        torch.jit.is_tracing()  # type: ignore[attr-defined]
        or tensor.numel() == 0
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in steps)
    expected, got = elements * tensor.element_size(), tensor.untyped_storage().nbytes()
    if got < expected:
        raise RuntimeError(
            f"{function}: {name}: expected a storage of at least {expected} bytes, got one of {got} "
            "bytes: its data is not allocated"
        )
