"""The form of the catalog's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from . import _work

Function = Callable[..., Any]
# (shapes in words, positional arguments, keyword arguments) of a call on tensors of a few elements.
Example = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Operator:
    """An operator of ``torch.ops.warpwright``. Each function takes the operator's arguments."""

    name: str
    # Runs where no kernel of ours does; None for an operator that no user's call names.
    native: Function | None = None
    # What torch.export's run_decompositions() replaces it by; None if no exported forward has it.
    aten: Function | None = None
    composed: bool = False  # of other operators, in C++: it has no kernel of its own
    autocast: bool = False
    differentiable: bool = True
    inference_only: bool = False  # raises for an argument that requires a gradient
    # Whether Inductor's form, fused with its neighbours, is as good: it only moves memory. May depend
    # on the arguments.
    is_fused_by_inductor: Callable[[tuple[Any, ...]], bool] = lambda args: False
    flops: Callable[..., int] | None = None  # for torch.utils.flop_counter; None: no products


@dataclass(frozen=True)
class Route:
    """A native function that ``patch()`` sends to us."""

    function: Any
    ours: str = ""  # our function's name, if it is not the op's
    first: str = "input"  # the name of its first argument


@dataclass(frozen=True)
class Chain:
    """Layers that ``swap(fuse=True)`` runs as this op."""

    ops: tuple[str, ...]
    module: str  # in warpwright.nn
    keeper: int = 0  # which of the layers becomes that module: the one with the parameters


@dataclass(frozen=True)
class Op:
    """A function of warpwright.functional, or an optimizer."""

    name: str
    operators: tuple[Operator, ...]
    # Native's layers that run on it, with the names of ours in warpwright.nn.
    modules: tuple[tuple[type[nn.Module], str], ...] = ()
    layer: str = ""  # in warpwright.nn, if native has no such layer
    is_plain: bool = False  # a function alone: no layer computes it
    routes: tuple[Route, ...] = ()
    chain: Chain | None = None
    integers: bool = False  # has kernels for integer tensors
    work: _work.OfCall | None = None  # bytes and FLOPs of a call that the profiler saw
    explain: str = ""  # explain.py's function for CUDA, without its underscore
    cpu: str = ""  # explain()'s answer for the CPU; SPECIAL of _explain_cpu.py has longer ones
    example: Callable[[str], Example] | None = None  # takes the device
    operations: float = 1.0  # per element moved: its place on a roofline if it has no FLOPs
    folders: tuple[str, ...] = ()  # of csrc/ops/; the one of its name if empty
    is_optimizer: bool = False
    sources: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", self.folders or (self.name,))
