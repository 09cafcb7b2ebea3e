"""Our ops in terms of ATen's, for exported programs and for what Inductor fuses.

`torch.export` keeps our ops in the program, and `run_decompositions()` replaces them by these
functions: ONNX and other backends then see ATen alone. While compiling, the ops that only move
memory are replaced too: a compiled backward of an eager forward may hold some, and so may a model
that calls `torch.ops.warpwright` itself. Each function takes its op's arguments and gives its results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ._catalog import OPERATORS
from ._op import Operator
from ._ops import ops

KEY = torch._C.DispatchKey.CompositeImplicitAutograd


def _is_listed(op: Any) -> bool:
    """Whether run_decompositions() runs and knows ``op``: then its Autograd kernels are replaced."""
    return torch._C.DispatchKey.AutogradCPU in op.py_kernels


def _complete(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of the op's positional arguments, of which a dispatch leaves defaults out."""
    arguments = [a for a in op._schema.arguments if not a.kwarg_only]

    def call(*args: Any, **kwargs: Any) -> Any:
        missing = [kwargs.pop(a.name, a.default_value) for a in arguments[len(args) :]]
        return function(*args, *missing, **kwargs)

    return call


def _is_chosen(op: Any) -> bool:
    """Whether the table that it runs with has ``op``, which it then decomposes."""
    return _is_listed(op) and op.py_kernels[KEY] is DECOMPOSITIONS[op]


def _leave_inductors_table() -> None:
    """Takes our ops out of Inductor's table of decompositions.

    When Inductor is imported it copies every op that export can decompose into that table. An op in
    it that reaches the lowering ends the compilation. Every trace passes here before the lowering.
    """
    inductor = sys.modules.get("torch._inductor.decomposition")
    if inductor is not None:
        for op in DECOMPOSITIONS:
            inductor.decompositions.pop(op, None)


def _register(operator: Operator, function: Callable[..., Any]) -> None:
    op = getattr(ops, operator.name)
    function = _complete(op, function)
    # What the user's table says of an op that writes to its arguments, it says by relu's entry:
    # torch.export lists functional ops alone.
    listed = ops.relu if op._schema.is_mutable else op

    @op.py_impl(KEY)  # type: ignore[untyped-decorator]
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        # Fake tensors ask, too; the op's own Meta kernel is for them. DTensor asks with plain
        # meta tensors how placements go through.
        asked = _is_chosen(listed) if op._schema.is_mutable else _is_listed(op)
        if asked or any(type(a) is Tensor and a.is_meta for a in args):
            return function(*args, **kwargs)
        return NotImplemented

    @op.py_impl(FunctionalTensorMode)  # type: ignore[untyped-decorator]
    def rule(mode: Any, *args: Any, **kwargs: Any) -> Any:
        _leave_inductors_table()
        if not (_is_chosen(listed) or operator.is_fused_by_inductor(args)):
            return mode.__torch_dispatch__(op, (), args, kwargs)
        with mode:
            result = function(*args, **kwargs)
        return result if op._schema.returns else None

    DECOMPOSITIONS[op] = decomposition


def _register_composed(operator: Operator, function: Callable[..., Any]) -> None:
    op = getattr(ops, operator.name)
    function = _complete(op, function)

    @op.py_impl(KEY)  # type: ignore[untyped-decorator]
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _is_listed(op) else op._op_dk(KEY, *args, **kwargs)

    DECOMPOSITIONS[op] = decomposition


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
for _operator in OPERATORS.values():
    if _operator.aten is not None:
        (_register_composed if _operator.composed else _register)(_operator, _operator.aten)
