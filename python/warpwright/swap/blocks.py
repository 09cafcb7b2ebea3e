"""A module whose forward is a generated function, while the facts hold that it was made from.

The module's class becomes a subclass with another ``forward``. Before each call, that forward
compares the facts: inputs, attributes that the original read, layers, their types and hooks. If any
differs, the original forward runs and calls the layers one by one.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import operator
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as fx_tracing
from torch.nn.modules import module as global_hooks

from .._tools import refuse_scripting
from .classes import PARALLEL
from .forms import binder
from .trace import REST, decorated, undecorated

Path = tuple[str, ...]
_MISSING = object()
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True)
class Layer:
    """A layer that the generated function calls differently, or not at all."""

    path: Path
    kinds: tuple[type[nn.Module], ...]  # what it may be, or what a generated class of it extends
    options: tuple[tuple[str, Any], ...]  # attributes that are constants in the function
    may_be_cut: bool = False  # over ranks: the function calls the layer itself

    def holds(self, block: nn.Module) -> bool:
        layer = at(block, self.path)
        if layer is None:
            return False
        if _has_hooks(layer) or ("forward" in layer.__dict__ and not self._is_cut(layer)):
            return False
        kind = type(layer)
        if kind not in self.kinds and base_of(kind) not in self.kinds:
            return False
        return all(getattr(layer, name) == value for name, value in self.options)

    def _is_cut(self, layer: nn.Module) -> bool:
        return self.may_be_cut and PARALLEL in layer.__dict__


@dataclass(frozen=True)
class Recipe:
    source: str  # of the function `forward`
    imports: tuple[tuple[str, str, str], ...]  # (name in the source, module, name in the module)
    # Indices of the block's arguments, in the signature's order: tensors; tensors or tuples of them;
    # and constants. Other arguments may have any value.
    tensors: tuple[int, ...]
    sequences: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    takes_rest: bool  # further keyword arguments, all handed on
    facts: tuple[tuple[str, Any], ...]  # attributes of the block that its forward decided by
    layers: tuple[Layer, ...]
    containers: tuple[tuple[Path, tuple[str, ...]], ...]  # names of the children of each

    def takes(self, values: tuple[Any, ...], rest: dict[str, Any]) -> bool:
        """Whether the function fits these arguments."""
        if rest and not self.takes_rest:
            return False
        for i in self.tensors:
            if not isinstance(values[i], Tensor):
                return False
        for i in self.sequences:
            value = values[i]
            if isinstance(value, Tensor):
                continue
            if type(value) not in (tuple, list) or not all(isinstance(v, Tensor) for v in value):
                return False
        for i, constant in self.constants:
            if type(values[i]) is not type(constant) or values[i] != constant:
                return False
        return True

    def holds(self, block: nn.Module) -> bool:
        """Whether the block is unchanged."""
        if all_layers_are_watched():
            return False
        for name, value in self.facts:
            now = getattr(block, name, _MISSING)
            if type(now) is not type(value) or now != value:
                return False
        for path, names in self.containers:
            container = at(block, path)
            if container is None or tuple(container._modules) != names:
                return False
        return all(layer.holds(block) for layer in self.layers)


def at(block: nn.Module, path: Path) -> nn.Module | None:
    found: nn.Module | None = block
    for name in path:
        found = None if found is None else found._modules.get(name)
    return found


def fits_fused(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a hook that accepts a fused layer's output instead of the layer's own."""
    hook._fits_fused = True  # type: ignore[attr-defined]
    return hook


def is_hooked(layer: nn.Module) -> bool:
    """Whether a hook reads this layer's own inputs, output or gradients, or it has its own forward."""
    return "forward" in layer.__dict__ or _has_hooks(layer)


def _has_hooks(layer: nn.Module) -> bool:
    if layer._backward_hooks or layer._backward_pre_hooks:
        return True
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        if hooks:
            for hook in hooks.values():
                if not getattr(hook, "_fits_fused", False):
                    return True
    return False


def all_layers_are_watched() -> bool:
    """Whether a hook on all modules, or torch.fx, watches every layer."""
    if fx_tracing._is_fx_tracing_flag and not torch.compiler.is_compiling():
        return True
    return bool(
        global_hooks._global_forward_hooks
        or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks
        or global_hooks._global_backward_pre_hooks
    )


def importable(function: Any) -> tuple[str, str]:
    """(module, name) to import ``function`` by. Raises ValueError if there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    try:
        if operator.attrgetter(str(name))(importlib.import_module(str(module))) is function:
            return str(module), str(name)
    except (ImportError, AttributeError):
        pass
    raise ValueError(f"{function} has no name to import it by")


def _namespace(recipe: Recipe) -> dict[str, Any]:
    found = {name: builtin.obj for name, builtin in fx.graph._custom_builtins.items()}
    for name, module, attribute in recipe.imports:
        found[name] = operator.attrgetter(attribute)(importlib.import_module(module))
    return found


def source_of(graph: fx.Graph) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """The source of ``graph`` as a function of ``self`` and its inputs, and what it imports."""
    code = graph.python_code("self")
    # fx has no node for `**`: one argument of this name stands for all further keyword arguments.
    source = re.sub(rf"\b{REST} = {REST}(?=[,)])", f"**{REST}", code.src)
    imports = [
        (name, *importable(value))
        for name, value in code.globals.items()
        if name not in fx.graph._custom_builtins
    ]
    return source.strip() + "\n", tuple(imports)


_classes: dict[tuple[type[nn.Module], tuple[Recipe, ...]], type[nn.Module]] = {}


def block_class(base: Any, recipes: tuple[Recipe, ...]) -> type[nn.Module]:
    """``base`` with the forwards of the recipes; the same class for the same recipes."""
    if (base, recipes) in _classes:
        return _classes[base, recipes]
    name = f"<warpwright: fused forward {len(_classes)} of {base.__name__}>"
    runs = [(recipe, _function(recipe, f"{name[:-1]}, {i}>")) for i, recipe in enumerate(recipes)]
    bind, arity = binder(base)
    original, decorators = undecorated(base)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != arity:
            values, rest = bind(self, *args, **kwargs)
        else:
            values, rest = args, _NOTHING
        for recipe, run in runs:
            if recipe.takes(values, rest) and recipe.holds(self):
                return run(self, *values, rest)
        return original(self, *args, **kwargs)

    made = generated_class(BASE, base, forward, decorators, _empty, base, recipes)
    _classes[base, recipes] = made
    return made


def _function(recipe: Recipe, name: str) -> Callable[..., Any]:
    scope = _namespace(recipe)
    exec(compile(recipe.source, name, "exec"), scope)
    linecache.cache[name] = (len(recipe.source), None, recipe.source.splitlines(True), name)
    return scope["forward"]  # type: ignore[no-any-return]


def _empty(base: type[nn.Module], recipes: tuple[Recipe, ...]) -> nn.Module:
    kind = block_class(base, recipes)
    return kind.__new__(kind)


# ---- generated classes ----

# Attributes of a generated class: the native class whose layers it calls differently, or the one
# whose forward it copies. See base_of and copied_class.
BASE = "_warpwright_base"
COPY_OF = "_warpwright_copy_of"


def generated_class(
    mark: str,
    base: Any,
    forward: Callable[..., Any],
    decorators: list[types.FunctionType],
    remake: Callable[..., nn.Module],
    *arguments: Any,
) -> type[nn.Module]:
    """A subclass of ``base`` with another forward, under the name of ``base``.

    Args:
        mark: ``BASE`` or ``COPY_OF``.
        decorators: what :func:`undecorated` took off the forward of ``base``.
        remake, arguments: ``remake(*arguments)`` gives the empty module that a pickle or a copy fills.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        parts: Any = object.__reduce_ex__(self, max(2, protocol))  # how to make it, of what, state
        return (remake, arguments, *parts[2:])

    places = ("__module__", "__doc__", "__firstlineno__")
    body = {name: vars(base)[name] for name in places if name in vars(base)}
    body |= {"__qualname__": base.__qualname__, "__reduce_ex__": reduce, mark: base}
    body["__prepare_scriptable__"] = refuse_scripting
    made = types.new_class(base.__name__, (base,), {}, lambda scope: scope.update(body))
    # Not in the body: a base class may decorate the forwards of its subclasses again.
    made.forward = decorated(forward, decorators)  # type: ignore[attr-defined]
    return made


def base_of(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that a generated class extends; None for any other class."""
    return vars(kind).get(BASE)


def copied_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class whose code ``kind`` runs: for a copy that calls another function, the copied one."""
    found: type[nn.Module] = vars(kind).get(COPY_OF, kind)
    return found


def why_no_block(module: nn.Module) -> str | None:
    """Why ``module`` cannot get a class with another forward; None if it can."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized"
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return "it pickles itself in its own way"
    return None
