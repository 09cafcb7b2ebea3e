"""The ways to call a module's forward, and a graph for each.

A graph holds for all calls in which Python takes the same decisions. Many arguments decide nothing:
the forward passes them on to a layer. Two traces find such an argument, one with a stand-in and one
with its default. If the graphs differ in that argument alone, one graph holds for all its values. An
argument that decides gets one graph for its default and one for tensors; a flag gets one per value.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from .trace import (
    REST,
    STAND_IN,
    Call,
    NotTraceable,
    Traced,
    default_call,
    is_plain,
    trace,
    undecorated,
)

MOST = 8  # graphs per forward


@dataclass(frozen=True)
class Form:
    traced: Traced
    free: frozenset[str]  # arguments that may have any value; REST: any further keyword arguments


def forms(module: nn.Module) -> list[Form]:
    """At least one form. Raises NotTraceable with the reason of the plainest call."""
    try:
        search = _Search(module)
    except (TypeError, ValueError) as error:  # a forward that is no Python function
        raise NotTraceable(f"its forward has no signature: {error}") from error
    return search.forms()


class _Search:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plain = default_call(module)
        self.found: dict[Any, Traced | NotTraceable] = {}

    def forms(self) -> list[Form]:
        """The graphs of all combinations of the deciding arguments' states."""
        call = next(filter(self.trace, self._starts()), None)
        if call is None:
            error = self.found[_key(self.plain)]
            assert isinstance(error, NotTraceable)
            raise error
        states = self._states(call)
        calls = [
            call.having(dict(zip(states, values, strict=True)))
            for values in itertools.islice(itertools.product(*states.values()), MOST)
        ]
        return [Form(t, self._free(t)) for t in map(self.trace, calls) if t is not None]

    def trace(self, call: Call) -> Traced | None:
        key = _key(call)
        if key not in self.found:
            try:
                self.found[key] = trace(self.module, call)
            except NotTraceable as error:
                self.found[key] = error
        found = self.found[key]
        return found if isinstance(found, Traced) else None

    def _starts(self) -> Iterator[Call]:
        """Calls to start from: stand-ins for all arguments, then for fewer."""
        takes_rest = any(p.kind is p.VAR_KEYWORD for p in self.plain.parameters)
        everything = {p.name: STAND_IN for p in self.plain.parameters}
        unset = {name: STAND_IN for name, value in self.plain.values if value is None}
        for rest in dict.fromkeys((takes_rest, False)):
            yield replace(self.plain.having(everything), rest=rest)
            yield replace(self.plain.having(unset), rest=rest)
            yield replace(self.plain, rest=rest)

    def _states(self, call: Call) -> dict[str, list[Any]]:
        """The states of each argument that lead to different graphs."""
        states: dict[str, list[Any]] = {}
        traced = self.trace(call)
        assert traced is not None
        required = {name for name, value in self.plain.values if value is STAND_IN}
        for name, value in call.values:
            states[name] = [value]
            if name in required and not is_handed_on(traced.graph, name):
                continue  # the forward computes with it: a tensor
            for other in self._others(name, value):
                twin = self.trace(call.having({name: other}))
                if twin is None:
                    continue
                with_input = traced if value is STAND_IN else twin
                is_pair = value is STAND_IN or other is STAND_IN
                handed_on = is_pair and is_handed_on(with_input.graph, name)
                if handed_on and same_but_for(name, traced, twin):
                    states[name] = [STAND_IN]
                    break
                states[name].append(other)
        return states

    def _free(self, traced: Traced) -> frozenset[str]:
        """The arguments that do not decide in this graph."""
        call, free = traced.call, set()
        for name, value in call.values:
            if value is STAND_IN and is_handed_on(traced.graph, name):
                others = [other for other in self._others(name, value) if other is not STAND_IN]
                twins = [self.trace(call.having({name: other})) for other in others]
                if any(t is not None and same_but_for(name, traced, t) for t in twins):
                    free.add(name)
        if call.rest:
            twin = self.trace(replace(call, rest=False))
            if twin is not None and same_but_for(REST, traced, twin):
                free.add(REST)
        return frozenset(free)

    def _others(self, name: str, value: Any) -> list[Any]:
        """Other values to try for an argument."""
        default = dict(self.plain.values)[name]
        if default is STAND_IN:
            default = None
        found = [STAND_IN, default] if is_plain(default) else [STAND_IN]
        if isinstance(default, bool):
            found.append(not default)
        return [other for other in found if other is not value]


def _key(call: Call) -> Any:
    """Identifies the call. Its values may have no hash; they live as long as the module's class."""
    return tuple(id(value) for _, value in call.values), call.rest


def same_but_for(name: str, one: Traced, other: Traced) -> bool:
    """Whether two graphs differ only in the argument ``name``, a stand-in in one and a constant in
    the other."""
    nodes = [
        [node for node in traced.graph.nodes if node.op != "placeholder"] for traced in (one, other)
    ]
    if len(nodes[0]) != len(nodes[1]):
        return False
    pairs = dict(zip(*nodes, strict=True))
    constants = [dict(traced.call.values).get(name, STAND_IN) for traced in (one, other)]

    def is_argument(value: Any) -> bool:
        return isinstance(value, fx.Node) and value.op == "placeholder"

    def same(a: Any, b: Any) -> bool:
        for value, constant, opposite in ((a, constants[1], b), (b, constants[0], a)):
            if is_argument(value) and value.target == name and not isinstance(opposite, fx.Node):
                return type(opposite) is type(constant) and bool(opposite == constant)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if is_argument(a) or is_argument(b):
                return a.op == b.op and a.target == b.target
            return pairs[a] is b
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            keys = [[key for key in value if key != REST] for value in (a, b)]
            return keys[0] == keys[1] and all(same(a[key], b[key]) for key in keys[0])
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, slice):
            return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        return bool(a == b)

    return all(
        a.op == b.op and a.target == b.target and same(a.args, b.args) and same(a.kwargs, b.kwargs)
        for a, b in pairs.items()
    )


def kind_of(graph: fx.Graph, name: str) -> str:
    """The kind that the argument's uses require: "any", "tensor", or "tensors" (one or a tuple).

    A layer that is called as before takes anything; a fused op takes tensors.
    """
    (node,) = (n for n in graph.nodes if n.op == "placeholder" and n.target == name)
    kinds = set()
    for user in node.users:
        if user.op == "output" or (user.op == "call_module" and "fused" not in user.kwargs):
            continue
        is_item = getattr(user.target, "__name__", "") == "getitem"
        kinds.add("tensors" if is_item and user.args[0] is node else "tensor")
    return "tensor" if "tensor" in kinds else "tensors" if kinds else "any"


Bind = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


def is_handed_on(graph: fx.Graph, name: str) -> bool:
    return kind_of(graph, name) == "any"


def binder(base: type[nn.Module]) -> tuple[Bind, int]:
    """A function with the signature of ``base``'s forward, and the number of positional arguments.

    The function returns the arguments in the signature's order, and the further keyword arguments. A
    call with that many positional arguments, and no others, does not need it. -1: every call does.
    """
    forward: Any = undecorated(base)[0]
    names, shown, defaults = [], [], {}
    rest = "{}"
    keyword_only = False
    parameters = list(inspect.signature(forward).parameters.values())
    for i, p in enumerate(parameters):
        if p.kind is p.VAR_KEYWORD:
            shown.append(f"**{p.name}")
            rest = p.name
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        names.append(p.name)
        defaults[f"_default_{p.name}"] = p.default
        shown.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
        following = parameters[i + 1].kind if i + 1 < len(parameters) else None
        if p.kind is p.POSITIONAL_ONLY and following is not p.POSITIONAL_ONLY:
            shown.append("/")
    values = "".join(f"{name}, " for name in names[1:])
    scope = dict(defaults)
    exec(f"def forward({', '.join(shown)}): return ({values}), {rest}", scope)
    bind: Any = scope["forward"]
    bind.__qualname__ = forward.__qualname__  # named by the error of a call that does not fit
    return bind, -1 if keyword_only else len(names) - 1
