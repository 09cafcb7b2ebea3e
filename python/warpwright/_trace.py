"""What a module's forward does, as a torch.fx graph whose nodes are calls of its layers.

Symbolic tracing runs ``forward`` once with stand-ins for the inputs and the layers. Whatever Python
decides meanwhile is frozen. So everything that a graph could lose is looked for: a forward is refused with
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
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
    # In this order: a checkpoint calls Dynamo's module, and that one the others.
    "torch.utils.checkpoint": "checkpoints its activations",
    "torch._dynamo.eval_frame": "calls what torch.compile made",
    "torch.autograd.function": "calls an autograd.Function",
    "torch.autograd.grad_mode": "switches gradients",
    "torch.amp.autocast_mode": "switches autocast",
    "torch.utils._contextlib": "runs under another mode",
}
MODULE_CALL = nn.Module.__call__.__code__


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
    """Traces a twin of the module; nothing outside of the twin is changed meanwhile.

    ``fx.Tracer.trace`` replaces ``nn.Module.__call__`` and ``__getattr__`` for the whole process, so
    a forward on another thread would end up in the graph, or fail.
    """

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def trace_twin(self, twins: _Twins, inputs: list[str]) -> fx.Graph:
        """The graph of ``twins.root``'s forward."""
        self.root = twins.root
        self.graph = fx.Graph(tracer_cls=type(self))
        self.submodule_paths = {twin: name for name, twin in self.root.named_modules()}
        self.tensor_attrs = {
            value: ".".join(part for part in (path, name) if part)
            for twin, path in self.submodule_paths.items()
            for name, value in vars(twin).items()
            if isinstance(value, Tensor)
        }
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in inputs]
        output = self.create_arg(type(self.root).forward(self.root, *proxies))
        self.create_node("output", "output", (output,), {})
        return self.graph


class _Twins:
    """A module and all below it once more: they share parameters and buffers with the originals.

    A call of a child becomes a node of the graph, and so does a parameter that is read.
    """

    def __init__(self, module: nn.Module, tracer: _Tracer) -> None:
        self.reads: dict[str, Any] = {}  # attributes of the root that its forward read
        self._tracer = tracer
        self._proxies: dict[str, Any] = {}  # of parameters and buffers, by name
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._twins: dict[nn.Module, nn.Module] = {}
        self.root = self._fill(self._root_class(type(module)), module)
        self.reads.clear()

    def _attribute(self, base: Any, twin: Any, name: str) -> Any:
        return self._tracer.getattr(name, base.__getattr__(twin, name), self._proxies)

    def _root_class(self, base: Any) -> type[nn.Module]:
        def getattribute(twin: Any, name: str) -> Any:
            self.reads[name] = value = base.__getattribute__(twin, name)
            return value

        def getattr_(twin: Any, name: str) -> Any:
            self.reads[name] = base.__getattr__(twin, name)
            return self._attribute(base, twin, name)

        return self._derived(base, __getattribute__=getattribute, __getattr__=getattr_)

    def _child_class(self, base: Any) -> type[nn.Module]:
        def call(twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._tracer.call_module(twin, twin.forward, args, kwargs)

        def getattr_(twin: Any, name: str) -> Any:
            return self._attribute(base, twin, name)

        if issubclass(base, torch.jit.ScriptModule):  # its state is not in Python
            return self._derived(nn.Module, __call__=call)
        return self._derived(base, __call__=call, __getattr__=getattr_)

    def _derived(self, base: Any, **body: Any) -> type[nn.Module]:
        return type(base)(base.__name__, (base,), {**body, "__module__": __name__})  # type: ignore[no-any-return]

    def _child(self, module: nn.Module) -> nn.Module:
        if module not in self._twins:
            base = type(module)
            if base not in self._classes:
                self._classes[base] = self._child_class(base)
            self._twins[module] = self._fill(self._classes[base], module)
        return self._twins[module]

    def _fill(self, kind: type[nn.Module], module: nn.Module) -> nn.Module:
        twin = object.__new__(kind)
        scripted = isinstance(module, torch.jit.ScriptModule)
        # Containers are copied: what a forward puts into them is not left in the module's own.
        vars(twin).update(
            {
                k: copy.copy(v) if isinstance(v, (list, dict, set)) else v
                for k, v in vars(nn.Module() if scripted else module).items()
            }
        )
        children = {} if scripted else module._modules
        twin._modules = {n: c if c is None else self._child(c) for n, c in children.items()}
        return twin


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
    if sys.getprofile() is None:
        return _trace(module)
    # Somebody profiles this thread, maybe in C, which could not be switched on again from here.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_trace, module).result()


def _trace(module: nn.Module) -> Traced:
    tracer = _Tracer()
    with _watched() as executed:
        try:
            names = _tensor_arguments(module)
            twins = _Twins(module, tracer)
            executed.clear()  # only what the forward calls counts
            with _OnlyInputs():
                graph = tracer.trace_twin(twins, names)
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
    leftovers = {key: value for key, value in vars(twins.root).items() if key != "_modules"}
    if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(leftovers)):
        raise NotTraceable("its forward keeps what it computes")
    for node in graph.nodes:
        if node.op == "get_attr" and not _has(module, node.target):
            raise NotTraceable("its forward makes a tensor of its own")
    facts = tuple((name, value) for name, value in twins.reads.items() if is_plain(value))
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


@contextlib.contextmanager
def _watched() -> Iterator[dict[CodeType, str]]:
    """The code that runs inside the block, with the name of its module."""
    executed: dict[CodeType, str] = {}

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            executed[frame.f_code] = str(frame.f_globals.get("__name__", ""))
        elif event == "c_call" and isinstance(getattr(argument, "__self__", None), FunctionMeta):
            executed[Function.forward.__code__] = Function.__module__  # its apply, in C

    sys.setprofile(watch)  # this thread's alone
    try:
        yield executed
    finally:
        sys.setprofile(None)


def _check_modules(executed: dict[CodeType, str]) -> None:
    entered = set(executed.values())
    for where, what in UNSEEN_MODULES.items():
        if where in entered:
            raise NotTraceable(f"its forward {what}")
    if MODULE_CALL in executed:
        raise NotTraceable("its forward calls a module that is none of its own")


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
