"""Native ops for kinds of tensors that no kernel of ours takes: sparse, nested, mkldnn, quantised, ...

Our operators refuse such a tensor before they compute anything: the dispatcher has no kernel for the
tensor's key, or a check finds no strides. The wrapper here catches the refusal and calls native. For
a plain tensor it adds one check: whether ``__torch_function__`` would override the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils._pytree import tree_leaves

from . import _C, _arguments, _ops
from ._arch import why_no_kernel
from ._catalog import NATIVE_OPERATORS

# How an operator refuses another kind of tensor: no kernel for its key, no such property or handler.
REFUSALS = (RuntimeError, TypeError)
# What an operator, or ATen's view, says of freed memory, which native would read.
NOT_ALLOCATED = re.compile("data is not allocated|setStorage: sizes")
functorch: Any = torch._C._functorch
# Types of arguments that override nothing. The check runs in every call under `patch()`.
PLAIN_TYPES = {Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype}
PASSING_ON = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def otherwise_native() -> None:
    """From now on ``ops`` calls native for tensors of other kinds."""
    for name in NATIVE_OPERATORS:
        setattr(_ops.ops, name, _with_native(name))


def _with_native(name: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.warpwright, name).default
    run = _C.direct_call(f"warpwright::{name}", overload._op)  # as the overload's __call__

    def call(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args) and _is_overridden(args, kwargs):
            _require_storages(name, overload._schema, args, kwargs)
            return NATIVE_OPERATORS[name](*args, **kwargs)
        try:
            return run(*args, **kwargs)
        except REFUSALS as error:
            if NOT_ALLOCATED.search(str(error)) or not _is_foreign(args, kwargs):
                raise
        _require_storages(name, overload._schema, args, kwargs)
        return NATIVE_OPERATORS[name](*args, **kwargs)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    call._torchdynamo_inline = traced  # type: ignore[attr-defined]  # torch.compile traces this
    return call


def _require_storages(
    name: str, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Native would read the freed memory of a plain tensor beside one of another kind."""
    positional = zip((argument.name for argument in schema.arguments), args, strict=False)
    for argument, value in (*positional, *kwargs.items()):
        for leaf in tree_leaves(value):
            _arguments.require_storage(name, argument, leaf)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _is_overridden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument's class has a ``__torch_function__`` that may override native's function."""
    return any(map(_overrides, args)) or any(map(_overrides, kwargs.values()))


def _overrides(argument: Any) -> bool:
    kind = type(argument)
    if kind in PLAIN_TYPES:
        return False
    if kind is list or kind is tuple:
        return any(map(_overrides, argument))
    if not isinstance(argument, Tensor):
        return False
    function = kind.__torch_function__
    return getattr(function, "__func__", function) not in PASSING_ON


def _is_foreign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    found = list(_tensors(args, kwargs))
    if not found:
        return False
    mixed_meta = found[0].is_meta and not all(tensor.is_meta for tensor in found)
    mixed_complex = not found[0].is_complex() and any(tensor.is_complex() for tensor in found)
    return mixed_meta or mixed_complex or any(_is_other_kind(tensor) for tensor in found)


def _is_other_kind(tensor: Tensor) -> bool:
    return (
        why_no_kernel(tensor, any_dtype=True) is not None
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_inference()
        or _is_functionalized(tensor)
    )


def _is_functionalized(tensor: Tensor) -> bool:
    """Whether ``torch.func.functionalize`` holds the tensor, below other transforms too.

    PyTorch refuses to functionalize a custom op that writes to an argument and returns something else.
    """
    while functorch.is_functorch_wrapped_tensor(tensor):
        if torch._is_functional_tensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return torch._is_functional_tensor(tensor)
