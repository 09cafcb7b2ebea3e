"""What a module's forward does, as a torch.fx graph whose nodes are calls of its layers.

Symbolic tracing runs ``forward`` once with stand-ins for the inputs, and whatever Python decides
meanwhile is frozen. So everything that a graph could lose is looked for: a forward is refused with
the reason, or what it depended on is handed out as facts that can be compared before each call.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import fx, nn
from torch.autograd.function import Function, FunctionMeta
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

PLAIN = (bool, int, float, str, type(None))
# What decides by kinds, by global state or by chance, or has an effect beside the result.
UNSEEN_NAMES = {
    *("isinstance", "issubclass", "type", "hasattr", "callable", "is_tensor", "vars"),
    *("is_grad_enabled", "set_grad_enabled", "is_inference_mode_enabled"),
    *("is_autocast_enabled", "is_compiling", "random", "numpy", "np", "time", "environ"),
    *("exec", "eval", "print"),
}
UNSEEN_STEPS = {
    "STORE_ATTR": "sets an attribute",
    "DELETE_ATTR": "deletes an attribute",
    "STORE_SUBSCR": "assigns to an item",
    "DELETE_SUBSCR": "deletes an item",
    "STORE_GLOBAL": "sets a global variable",
    "SETUP_WITH": "has a with block",
    "BEFORE_WITH": "has a with block",
    "LOAD_SPECIAL": "has a with block",
}
UNSEEN_MODULES = {
    "torch.utils.checkpoint": "checkpoints its activations",
    "torch.autograd.function": "calls an autograd.Function",
    "torch.autograd.grad_mode": "switches gradients",
    "torch.amp.autocast_mode": "switches autocast",
    "torch.utils._contextlib": "runs under another mode",
}


class NotTraceable(Exception):
    """The reason in words, to be read after the module's name."""


@dataclass(frozen=True)
class Traced:
    graph: fx.Graph
    arity: int  # how many positional tensors the graph takes; further arguments had their defaults
    facts: tuple[tuple[str, Any], ...]  # plain attributes of the module that its forward read


class _Proxy(fx.Proxy):
    """Records ``x += y`` as what it is; fx alone takes it for ``x = x + y``."""


def _recorded(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
    *(operator.ilshift, operator.irshift),
}
for _function in IN_PLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _recorded(_function))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


class _OnlyInputs(TorchFunctionMode):
    """Refuses what is computed from no input: fx would do it once and keep the result."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            name = getattr(func, "__name__", str(func))
            raise NotTraceable(f"its forward calls {name} on what is not its input")
        return func(*args, **kwargs)


def trace(module: nn.Module) -> Traced:
    """Raises NotTraceable where the graph could miss something."""
    reads: dict[str, Any] = {}
    with _watched() as executed:
        try:
            names = _tensor_arguments(module)
            probe = _probe(module, names, reads)
            with _OnlyInputs():
                graph = _Tracer().trace(probe)
        except NotTraceable:
            _check_modules(executed)  # the cause, where there is one, in better words
            raise
        except Exception as error:  # whatever a foreign forward raises on stand-ins
            _check_modules(executed)
            first = (str(error).splitlines() or [""])[0]
            raise NotTraceable(
                f"its forward can't be traced: {type(error).__name__}: {first}"[:200]
            ) from error
    _check_modules(executed)
    _check_steps(executed)
    leftovers = {key: value for key, value in vars(probe).items() if key != "_modules"}
    if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(leftovers)):
        raise NotTraceable("its forward keeps what it computes")
    for node in graph.nodes:
        if node.op == "get_attr" and not _has(module, node.target):
            raise NotTraceable("its forward makes a tensor of its own")
    facts = tuple((name, value) for name, value in reads.items() if is_plain(value))
    return Traced(graph, len(names), facts)


def _has(module: nn.Module, path: str) -> bool:
    try:
        operator.attrgetter(path)(module)
    except AttributeError:
        return False
    return True


def is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(v) in PLAIN for v in value)
    return type(value) in PLAIN


def _tensor_arguments(module: nn.Module) -> list[str]:
    """The names of forward's required arguments."""
    names = []
    for p in inspect.signature(module.forward).parameters.values():
        if p.kind is p.VAR_POSITIONAL or (p.kind is p.KEYWORD_ONLY and p.default is p.empty):
            raise NotTraceable(f"its forward takes {p}")
        if p.kind is not p.VAR_KEYWORD and p.default is p.empty:
            names.append(p.name)
    if not names:
        raise NotTraceable("its forward takes no input")
    return names


def _probe(module: nn.Module, names: list[str], reads: dict[str, Any]) -> nn.Module:
    """A twin that shares parameters and layers, and notes which attributes its forward reads."""
    base: Any = type(module)

    def getattribute(self: Any, name: str) -> Any:
        reads[name] = value = base.__getattribute__(self, name)
        return value

    def getattr_(self: Any, name: str) -> Any:
        reads[name] = value = base.__getattr__(self, name)
        return value

    arguments = ", ".join(names)
    scope: dict[str, Any] = {"_run": base.forward, "__name__": __name__}
    exec(f"def forward(_self, {arguments}):\n  return _run(_self, {arguments})", scope)
    scope["forward"].__annotations__ = {}
    body = {"__getattribute__": getattribute, "__getattr__": getattr_, "forward": scope["forward"]}
    twin = object.__new__(type(base)(base.__name__, (base,), {**body, "__module__": __name__}))
    # Containers are copied: what a forward puts into them is not left in the module's own.
    vars(twin).update(
        {
            k: copy.copy(v) if isinstance(v, (list, dict, set)) else v
            for k, v in vars(module).items()
        }
    )
    reads.clear()
    return twin  # type: ignore[no-any-return]


@contextlib.contextmanager
def _watched() -> Iterator[dict[CodeType, str]]:
    """The code that runs inside the block, with the name of its module."""
    executed: dict[CodeType, str] = {}

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            executed[frame.f_code] = str(frame.f_globals.get("__name__", ""))
        elif event == "c_call" and isinstance(getattr(argument, "__self__", None), FunctionMeta):
            executed[Function.forward.__code__] = Function.__module__  # its apply, in C

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield executed
    finally:
        sys.setprofile(previous)


def _check_modules(executed: dict[CodeType, str]) -> None:
    entered = set(executed.values())
    for where, what in UNSEEN_MODULES.items():
        if where in entered:
            raise NotTraceable(f"its forward {what}")


def _check_steps(executed: dict[CodeType, str]) -> None:
    """Refuses code of the model whose effect or decision a graph does not show."""
    for code, where in executed.items():
        top = where.partition(".")[0]
        if top == "torch" or top in sys.stdlib_module_names or where == __name__:
            continue
        for name in code.co_names:
            if name in UNSEEN_NAMES:
                raise NotTraceable(f"{code.co_name} asks for {name}, which a trace would freeze")
        owner: Any = None
        for step in dis.get_instructions(code):
            if step.opname in UNSEEN_STEPS:
                raise NotTraceable(f"{code.co_name} {UNSEEN_STEPS[step.opname]}")
            if step.argval == "training" and step.opname == "LOAD_ATTR" and owner != "self":
                raise NotTraceable(f"{code.co_name} asks for another module's training")
            owner = step.argval
