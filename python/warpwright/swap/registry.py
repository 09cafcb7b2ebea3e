"""Layers that other libraries define and one of our ops computes.

:func:`register_layer` adds one. A class is recognised by its code (``sources``), so that all copies
of a class are, whatever their names. Before the first use of a class, its results and gradients are
compared with native's on a small example.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._arguments import shown
from .._tools import Layer, LayerType
from .._user_errors import kind_of, require_function
from ..integrations import loaded
from . import patterns
from .classes import MODULES, NATIVE_LAYERS, OPS
from .sources import fingerprint

Example = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Known:
    """How a layer runs on one of our ops."""

    op: str
    # The layer's forward; None if only chains (fuse=True) run on our ops.
    forward: Callable[..., Any] | None
    # Returns a small layer and the positional arguments of a call, in float32 on the CPU.
    example: Example
    # For "linear": calls a functional on (input, weight, bias), with further options.
    fused: Callable[..., Any] | None = None
    # For an activation: the options that the class implies.
    constants: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()  # attributes with layers that `forward` computes itself


_known: dict[str, Known] = {}  # by the fingerprint of the class
# What find() said: why the class is not used, "" if it is.
_found: dict[tuple[type, Any], str] = {}
UNKNOWN = "unknown"


def register_layer(
    module_class: type[nn.Module],
    forward: Callable[..., Any],
    *,
    op: str,
    example: Callable[[], tuple[Any, ...]],
) -> None:
    """Teaches :func:`warpwright.swap` a layer that an op of warpwright computes.

    ``swap`` then gives instances of exactly ``module_class`` another class with ``forward``, and
    ``unswap`` gives them ``module_class`` back. Copies of the class with the same code are swapped
    too. A subclass with other code is not.

    The layers of transformers and timm that docs/integrations.md lists are known without a call.

    Args:
        module_class: the native class; its forward needs source code.
        forward: replaces the forward, with the same arguments: ``forward(self, ...)``. It reads
            parameters and attributes from ``self``.
        op: the function of :mod:`warpwright.functional` that ``forward`` calls. ``swap(ops=...)``
            selects by it, and the report names it.
        example: returns a small layer and the arguments of a call, in float32 on the CPU:
            ``lambda: (MyNorm(16), torch.randn(4, 16))``. It runs under a fixed seed. Its parameters
            should be random: weights of 1 prove little.
    Raises:
        TypeError: ``module_class`` is no subclass of ``torch.nn.Module``, or a class of torch or
            warpwright; ``forward`` or ``example`` can't be called so, or ``example`` returns no such
            layer and arguments.
        ValueError: ``op`` is unknown, the class has no source code, or results or gradients on the
            example miss the error rule of :mod:`warpwright.testing`, in float32 or bfloat16.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(
            f"module_class: expected a subclass of torch.nn.Module, got {module_class!r}"
        )
    if _is_built_in(module_class):
        raise TypeError(f"module_class: {module_class.__name__} is a class of torch or warpwright")
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}; got {op!r}")
    if not callable(forward):
        raise TypeError(f"forward: expected a function of (self, ...), got {kind_of(forward)}")
    require_function("example", example, words="()")
    source = fingerprint(module_class)
    if source is None:
        raise ValueError(
            f"module_class: {module_class.__name__} has no source code to recognise it by"
        )
    known = Known(op, forward, example)
    made = _subclass(module_class, known)
    faults = _faults(module_class, made, known)
    if faults:
        raise ValueError(
            f"forward: differs from {module_class.__name__}'s on the example: {'; '.join(faults)}"
        )
    _known[source] = known
    _forget_unknown()  # there may be copies of the class
    _add(module_class, made, known)
    _found[module_class, module_class.forward] = ""


def register_code(known: Known, *sources: str) -> None:
    """Adds a layer by the fingerprints of its classes, before any of them is imported."""
    for source in sources:
        _known[source] = known
    _forget_unknown()


def _forget_unknown() -> None:
    for key in [key for key, why in _found.items() if why == UNKNOWN]:
        del _found[key]


def find(kind: type[nn.Module]) -> str:
    """Looks ``kind`` up, and checks it at its first use.

    Returns:
        "" if its layers can be swapped (``MODULES`` then has it) or fused (``patterns.KINDS``);
        UNKNOWN; or the reason why it is not trusted.
    """
    key = (kind, kind.forward)
    if key not in _found:
        _found[key] = UNKNOWN if _is_built_in(kind) else _look_up(kind)
    return _found[key]


def _is_built_in(kind: type[nn.Module]) -> bool:
    """Whether it is ours, or torch's, or one that torch derived, as ``fully_shard`` does."""
    if issubclass(kind, Layer) or kind.__module__.startswith("torch."):
        return True
    bases = [base.__module__ for base in kind.__mro__]
    return any(b.startswith("torch.") and not b.startswith("torch.nn.modules.") for b in bases)


def _look_up(kind: type[nn.Module]) -> str:
    known = _known.get(fingerprint(kind) or "") or _known.get(fingerprint(kind, init=True) or "")
    if known is None:
        return "its forward has changed since it was registered" if kind in MODULES else UNKNOWN
    try:
        made = _subclass(kind, known)
        faults = _faults(kind, made, known)
    except Exception as error:  # a metaclass, a class that needs more than its forward reads, ...
        faults = [f"{type(error).__name__}: {error}"]
    if faults:
        return f"{known.op} differs from it on a small input: {faults[0]}"
    _add(kind, made, known)
    return ""


def _add(kind: type[nn.Module], made: type[nn.Module], known: Known) -> None:
    if known.forward is None:
        patterns.KINDS[kind] = patterns.Kind(kind, kind, known.op, (), known.constants)
        return
    MODULES[kind] = made, known.op
    NATIVE_LAYERS[made] = kind
    if known.fused is None:
        return
    patterns.KINDS[kind] = patterns.KINDS[made] = patterns.Kind(kind, made, known.op)
    fused = known.fused
    for layer_class in (kind, made):
        patterns.OPERANDS[layer_class] = lambda layer: fused(layer, lambda _, *found: found, None)
    for pattern in patterns.PATTERNS:
        if pattern.ops[pattern.keeper] == known.op:
            keeper = _subclass(made, known, pattern)
            patterns.add_keeper(pattern, kind, keeper)
            NATIVE_LAYERS[keeper] = kind


def _faults(kind: type[nn.Module], made: type[nn.Module], known: Known) -> list[str]:
    """How ``made`` differs from ``kind`` on the example."""
    from .check import bare, compare_module

    faults = []
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            example = known.example()
            layer = example[0] if isinstance(example, (tuple, list)) and example else None
            if not isinstance(layer, nn.Module):
                words = f"expected it to return a tuple of a {kind.__name__} and a call's arguments"
                raise TypeError(f"example: {words}, got {shown(example)}")
            args = [*example[1:]]
            layer = bare(layer, kind).to(dtype)
            for tensor in (*layer.parameters(), *args):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.requires_grad_()
            args = [a.detach().to(dtype).requires_grad_() if _is_floating(a) else a for a in args]
            _, lines = compare_module(layer, kind, made, (tuple(args), {}))
            faults += [f"{line} ({str(dtype).removeprefix('torch.')})" for line in lines]
    return faults


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- our classes ----


class _Generated(LayerType):
    """The metaclass of our classes. Pickles of fused models name a class, which no module has."""

    _native: type[nn.Module]
    _functional: str | None  # a keeper's

    def reduced(cls) -> tuple[Any, ...]:
        return _class, (cls._native, cls._functional)


copyreg.pickle(_Generated, _Generated.reduced)  # type: ignore[arg-type]


def _subclass(
    base: type[nn.Module], known: Known, pattern: patterns.Pattern | None = None
) -> type[nn.Module]:
    """``base`` with our forward; with a pattern: its keeper, for a ``base`` with our forward."""
    name, forward = base.__name__, known.forward or _step_forward(known)
    if pattern is not None:
        name, forward = pattern.module, _keeper_forward(known, pattern.functional)
    native: Any = NATIVE_LAYERS[base] if pattern is not None else base
    functional = pattern.functional if pattern is not None else None

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        parts: Any = object.__reduce_ex__(self, max(2, protocol))  # how to make it, of what, state
        return (_empty, (type(self),), *parts[2:])

    body = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": native.__doc__,
        "_native": native,
        "_functional": functional,
        "_parts": known.parts,
        "forward": forward,
        "__reduce_ex__": reduce,
        "_get_name": lambda self: f"warpwright.{name}",
    }
    if native.__repr__ is not nn.Module.__repr__:
        body["__repr__"] = lambda self: f"warpwright.{native.__repr__(self)}"
    bases = (base,) if issubclass(base, Layer) else (Layer, base)
    options = {"metaclass": _Generated}
    return types.new_class(name, bases, options, lambda scope: scope.update(body))


def _step_forward(known: Known) -> Callable[..., Any]:
    """What a chain computes in place of an activation."""
    step = patterns.STEPS[known.op]
    return lambda self, input: step(input, **known.constants)


def _keeper_forward(known: Known, functional: str) -> Callable[..., Any]:
    plain, fused_on = known.forward, known.fused
    function = functools.partial(patterns.run_product, functional)
    assert plain is not None
    assert fused_on is not None

    def forward(self: nn.Module, x: Any, fused: dict[str, Any] | None = None) -> Any:
        if fused is None:
            return plain(self, x)
        return fused_on(self, function, x, **fused)

    return forward


def _class(native: type[nn.Module], functional: str | None) -> type[nn.Module]:
    """For pickles. A class that is not trusted here, as in another version of its library, is native."""
    for _ in loaded():  # each registers its layers
        pass
    if find(native) == "":
        for (pattern, theirs), keeper in patterns.KEEPERS.items():
            if theirs is native and pattern.functional == functional:
                return keeper
        return MODULES[native][0]
    if functional is not None:
        raise RuntimeError(
            f"the pickle holds a {functional} of {native.__name__}, which warpwright does not know in this "
            "process: save the model after warpwright.unswap"
        )
    return native


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)
