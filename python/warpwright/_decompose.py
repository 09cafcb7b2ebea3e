"""Registers our operators' decompositions into ATen's, for exported and compiled programs.

`torch.export` keeps our operators in the program. `run_decompositions()` replaces them by the
catalog's functions, so that ONNX and other backends see ATen only. A compilation also replaces the
operators that only move memory, which Inductor fuses. They come from a compiled backward of an eager
forward, or from a model that calls `torch.ops.warpwright` itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import get_layout_constraint_tag
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from ._catalog import OPERATORS
from ._op import Operator
from ._ops import ops

KEY = torch._C.DispatchKey.CompositeImplicitAutograd
TRACED = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


def _is_listed(op: Any) -> bool:
    """Whether run_decompositions() runs and has ``op``: it then replaces the Autograd kernels."""
    return torch._C.DispatchKey.AutogradCPU in op.py_kernels


def _complete(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the op's defaults, which a dispatch leaves out of the positional arguments."""
    arguments = [a for a in op._schema.arguments if not a.kwarg_only]

    def call(*args: Any, **kwargs: Any) -> Any:
        missing = [kwargs.pop(a.name, a.default_value) for a in arguments[len(args) :]]
        return function(*args, *missing, **kwargs)

    return call


def _is_chosen(op: Any) -> bool:
    """Whether run_decompositions() has ``op`` in its table, so that it decomposes it."""
    return _is_listed(op) and op.py_kernels[KEY] is DECOMPOSITIONS[op]


def _leave_inductors_table() -> None:
    """Takes our ops out of Inductor's table of decompositions.

    Inductor's import copies every op that export can decompose into that table. If an op of the table
    reaches the lowering, the compilation fails.
    """
    inductor = sys.modules.get("torch._inductor.decomposition")
    if inductor is not None:
        for op in DECOMPOSITIONS:
            inductor.decompositions.pop(op, None)


@functools.cache
def _tell_inductor() -> None:
    """Registers our operators with Inductor as calls that it leaves as they are.

    Inductor would register each one at its first call. There it also writes the call's arguments as
    text, and each argument contains all that it was computed from. The text of a deep network's
    backward grows exponentially.
    """
    lowering = sys.modules["torch._inductor.lowering"]
    for name, operator in OPERATORS.items():
        op = getattr(torch.ops.warpwright, name).default
        if not operator.composed and op not in lowering.lowerings:
            tag = get_layout_constraint_tag(op, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)


def _before_inductor() -> None:
    """Runs in each trace that calls an op with a decomposition, before Inductor lowers the trace."""
    _leave_inductors_table()
    if "torch._inductor.lowering" in sys.modules:
        _tell_inductor()


def _is_subclass(argument: Any) -> bool:
    """Whether it is a tensor of a kind that FunctionalTensorMode leaves to its own class."""
    return isinstance(argument, Tensor) and type(argument) not in TRACED


def _register(operator: Operator, function: Callable[..., Any]) -> None:
    op = getattr(ops, operator.name)
    function = _complete(op, function)
    # torch.export lists functional ops only. relu's entry in the user's table decides for ops that
    # write to their arguments.
    listed = ops.relu if op._schema.is_mutable else op

    @op.py_impl(KEY)  # type: ignore[untyped-decorator]
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        # Fake tensors ask too, but use the op's Meta kernel. DTensor asks with plain meta tensors
        # how placements propagate.
        asked = _is_chosen(listed) if op._schema.is_mutable else _is_listed(op)
        if asked or any(type(a) is Tensor and a.is_meta for a in args):
            return function(*args, **kwargs)
        return NotImplemented

    @op.py_impl(FunctionalTensorMode)  # type: ignore[untyped-decorator]
    def rule(mode: Any, *args: Any, **kwargs: Any) -> Any:
        _before_inductor()
        if any(_is_subclass(a) for a in args):  # such as a DTensor, which dispatches first
            with mode:
                return op._op_dk(torch._C.DispatchKey.Python, *args, **kwargs)
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
