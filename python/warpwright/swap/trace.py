"""A module's forward as a torch.fx graph whose nodes are calls of its layers.

Symbolic tracing runs ``forward`` once with stand-ins for the inputs and the layers. The graph freezes
every decision that Python makes in this run. So the tracer looks for everything that a graph could
lose. It refuses such a forward with the reason, or returns the facts that the forward depended on,
which a caller can compare before each call.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import Function, FunctionMeta
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

PLAIN = (bool, int, float, str, type(None))
# Names of functions that decide by type, by global state or by chance, or that have side effects.
UNSEEN_NAMES = {
    *("isinstance", "issubclass", "type", "hasattr", "callable", "is_tensor", "vars"),
    *("is_grad_enabled", "set_grad_enabled", "is_inference_mode_enabled"),
    *("is_autocast_enabled", "is_compiling", "random", "numpy", "np", "time", "environ"),
    *("exec", "eval", "print", "locals"),
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
    "MATCH_CLASS": "matches a pattern",
    "MATCH_MAPPING": "matches a pattern",
    "MATCH_SEQUENCE": "matches a pattern",
}
UNSEEN_MODULES = {
    # In this order: a checkpoint calls Dynamo's module, which calls the others.
    "torch.utils.checkpoint": "checkpoints its activations",
    "torch._dynamo.eval_frame": "calls what torch.compile made",
    "torch.autograd.function": "calls an autograd.Function",
    "torch.autograd.grad_mode": "switches gradients",
    "torch.amp.autocast_mode": "switches autocast",
    "torch.utils._contextlib": "runs under another mode",
}
MODULE_CALL = nn.Module.__call__.__code__


class NotTraceable(Exception):
    """The message is the reason, as a sentence about the module's forward."""


class _StandIn:
    def __repr__(self) -> str:
        return "a stand-in"


STAND_IN: Any = _StandIn()
REST = "_warpwright_rest"  # stands for all further keyword arguments of a call


@dataclass(frozen=True)
class Call:
    """The arguments of a forward: values, or stand-ins that become inputs of the graph."""

    parameters: tuple[inspect.Parameter, ...]
    values: tuple[tuple[str, Any], ...]  # by name
    rest: bool = False  # also with further keyword arguments

    def having(self, values: dict[str, Any]) -> Call:
        return replace(
            self, values=tuple((name, values.get(name, value)) for name, value in self.values)
        )

    def arguments(self, inputs: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments; ``inputs`` (one per parameter, one for the rest) are the
        stand-ins."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        kinds = {p.name: p.kind for p in self.parameters}
        for (name, value), stand_in in zip(self.values, inputs, strict=False):
            given = stand_in if value is STAND_IN else value
            if kinds[name] is inspect.Parameter.KEYWORD_ONLY:
                kwargs[name] = given
            else:
                args.append(given)
        if self.rest:
            kwargs[REST] = inputs[-1]
        return args, kwargs


@dataclass(frozen=True)
class Traced:
    graph: (
        fx.Graph
    )  # an input for each of the call's values, also for constants, and one for the rest
    call: Call
    facts: tuple[tuple[str, Any], ...]  # plain attributes of the module that its forward read


class _Proxy(fx.Proxy):
    """Records ``x += y`` as an in-place operator; fx records ``x = x + y``."""


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
    """Traces a twin of the module and changes nothing outside of the twin.

    ``fx.Tracer.trace`` replaces ``nn.Module.__call__`` and ``__getattr__`` for the whole process: a
    forward on another thread would enter the graph, or fail.
    """

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def trace_twin(self, twins: _Twins, call: Call) -> fx.Graph:
        """The graph of ``twins.root``'s forward, called by ``call``."""
        self.root = twins.root
        self.graph = fx.Graph(tracer_cls=type(self))
        self.submodule_paths = {twin: name for name, twin in self.root.named_modules()}
        self.tensor_attrs = {
            value: ".".join(part for part in (path, name) if part)
            for twin, path in self.submodule_paths.items()
            for name, value in vars(twin).items()
            if isinstance(value, Tensor)
        }
        names = [*(name for name, _ in call.values), REST]
        args, kwargs = call.arguments([self.create_proxy("placeholder", n, (), {}) for n in names])
        forward, _ = undecorated(type(self.root))
        output = self.create_arg(forward(self.root, *args, **kwargs))
        self.create_node("output", "output", (output,), {})
        return self.graph


class _Twins:
    """Twins of a module and of all modules below it, which share the originals' parameters and buffers.

    A call of a child becomes a node of the graph, and so does a parameter that the forward reads.
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
        # Containers are copied, so that a traced forward does not change the module's own.
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
    """Refuses a computation without an input: fx would run it once and keep the result."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            name = getattr(func, "__name__", str(func))
            raise NotTraceable(f"its forward calls {name} on what is not its input")
        return func(*args, **kwargs)


def trace(module: nn.Module, call: Call | None = None) -> Traced:
    """The graph of ``call``, by default with the required arguments only.

    Raises NotTraceable if the graph could miss something.
    """
    if sys.getprofile() is None:
        return _trace(module, call)
    # A profiler watches this thread. It may be written in C, and Python could not restore it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_trace, module, call).result()


def _trace(module: nn.Module, call: Call | None) -> Traced:
    tracer = _Tracer()
    saw_rest: set[CodeType] = set()
    with _watched(saw_rest) as executed:
        try:
            call = call or default_call(module)
            twins = _Twins(module, tracer)
            executed.clear()  # only calls of the forward count
            saw_rest.clear()
            with _OnlyInputs():
                graph = tracer.trace_twin(twins, call)
        except NotTraceable:
            _check_modules(executed)  # raises with a better reason, if it has one
            raise
        except Exception as error:  # a foreign forward may raise anything on stand-ins
            _check_modules(executed)
            first = (str(error).splitlines() or [""])[0]
            raise NotTraceable(
                f"its forward can't be traced: {type(error).__name__}: {first}"[:200]
            ) from error
    _check_modules(executed)
    _check_steps(executed)
    if call.rest:
        _check_rest(module, executed, saw_rest)
    leftovers = {key: value for key, value in vars(twins.root).items() if key != "_modules"}
    if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(leftovers)):
        raise NotTraceable("its forward keeps what it computes")
    for node in graph.nodes:
        if node.op == "get_attr" and not _has(module, node.target):
            raise NotTraceable("its forward makes a tensor of its own")
    facts = tuple((name, value) for name, value in twins.reads.items() if is_plain(value))
    return Traced(graph, call, facts)


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


def undecorated(kind: type[nn.Module]) -> tuple[Any, list[FunctionType]]:
    """The forward of ``kind`` without its decorators, and the decorators, the outermost first.

    A decorator is a function with ``__wrapped__`` in its closure. It decides at each call, and a trace
    does not go through it. torch's own decorators switch modes: they stay part of the forward.
    """
    forward: Any = kind.forward
    decorators = []
    while isinstance(forward, FunctionType) and not _is_torchs(forward):
        inner = getattr(forward, "__wrapped__", None)
        if inner is None or not any(_holds(cell, inner) for cell in forward.__closure__ or ()):
            break
        decorators.append(forward)
        forward = inner
    return forward, decorators


def decorated(forward: Any, decorators: list[FunctionType]) -> Any:
    """``forward`` inside copies of the decorators that ``undecorated`` found."""
    for decorator in reversed(decorators):
        inner = decorator.__wrapped__  # type: ignore[attr-defined]
        closure = tuple(
            CellType(forward) if _holds(cell, inner) else cell
            for cell in decorator.__closure__ or ()
        )
        copied = FunctionType(
            decorator.__code__,
            decorator.__globals__,
            decorator.__name__,
            decorator.__defaults__,
            closure,
        )
        copied.__kwdefaults__ = decorator.__kwdefaults__
        forward = functools.update_wrapper(copied, forward)
    return forward


def _is_torchs(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False


def default_call(module: nn.Module) -> Call:
    """Stand-ins for forward's required arguments, the defaults for the others."""
    signature = inspect.signature(undecorated(type(module))[0])
    parameters = tuple(signature.parameters.values())[1:]
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            raise NotTraceable(f"its forward takes {p}")
    values = tuple(
        (p.name, STAND_IN if p.default is p.empty else p.default)
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    )
    if not values:
        raise NotTraceable("its forward takes no input")
    return Call(parameters, values)


@contextlib.contextmanager
def _watched(saw_rest: set[CodeType]) -> Iterator[dict[CodeType, str]]:
    """Collects the code that runs inside the block, with its module's name.

    ``saw_rest`` collects the code that received REST among its further keyword arguments.
    """
    executed: dict[CodeType, str] = {}

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            executed[frame.f_code] = str(frame.f_globals.get("__name__", ""))
            rest = _rest_name(frame.f_code)
            if rest is not None and REST in (frame.f_locals.get(rest) or ()):
                saw_rest.add(frame.f_code)
        elif event == "c_call" and isinstance(getattr(argument, "__self__", None), FunctionMeta):
            executed[Function.forward.__code__] = Function.__module__  # its apply, in C

    collects = gc.isenabled()
    gc.disable()  # callbacks of the collector (gc.callbacks) are not the model's code
    sys.setprofile(watch)  # this thread's alone
    try:
        yield executed
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def _check_modules(executed: dict[CodeType, str]) -> None:
    entered = set(executed.values())
    for where, what in UNSEEN_MODULES.items():
        if where in entered:
            raise NotTraceable(f"its forward {what}")
    if MODULE_CALL in executed:
        raise NotTraceable("its forward calls a module that is none of its own")


def _check_steps(executed: dict[CodeType, str]) -> None:
    """Refuses a model's code whose effects or decisions a graph does not show."""
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


def _rest_name(code: CodeType) -> str | None:
    """The name of the argument that takes the further keyword arguments."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[named]


def _check_rest(module: nn.Module, executed: dict[CodeType, str], saw: set[CodeType]) -> None:
    """Refuses a forward that does more with its ``**kwargs`` than pass all of them to a layer.

    A stand-in cannot show which of them a function takes by name or looks up.
    """
    forward: Any = undecorated(type(module))[0]
    of_forward: set[CodeType] = set()
    while forward is not None:  # it and its decorators
        if hasattr(forward, "__code__"):
            of_forward.add(forward.__code__)
        forward = getattr(forward, "__wrapped__", None)
    for code in saw:
        top = executed[code].partition(".")[0]
        if top != "torch" and executed[code] != __name__ and code not in of_forward:
            raise NotTraceable(f"{code.co_name} gets the keyword arguments of the forward")
    for code in of_forward & set(executed):
        name = _rest_name(code)
        steps = list(dis.get_instructions(code))
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if name is None or name not in loaded:
                continue
            gives_all = following is not None and following.opname == "DICT_MERGE"
            if not (step.opname.startswith("LOAD_FAST") and loaded[-1] == name and gives_all):
                raise NotTraceable(f"{code.co_name} looks into its keyword arguments")
