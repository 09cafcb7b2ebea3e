"""Finds chains of layers that one op of ours computes, for ``swap(fuse=True)``.

The search reads the graph of the forward that calls the layers (``trace``), not the order of
registration: a ReLU may be called several times, or be a function. One layer of the chain, the
keeper, becomes the fused module (``patterns``). The calling module gets a generated forward
(``blocks``), which asks the keeper for the fused op and omits the other calls. Parameters, buffers,
the names in ``state_dict`` and all modules keep their places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .. import functional as F
from .blocks import Layer, Recipe, block_class, is_hooked, source_of, why_no_block
from .candidates import may_be_rewritten, may_have_chains
from .forms import Form, forms, kind_of
from .patterns import (
    ALONE,
    CONVOLUTIONS,
    FUNCTIONS,
    KEEPER_LAYERS,
    KEEPERS,
    KINDS,
    MAKES_NEW,
    METHODS,
    ONLY_FUSED,
    OPERANDS,
    PATTERNS,
    Pattern,
)
from .steps import Step, is_dilated, is_in_place, label
from .trace import REST, STAND_IN, NotTraceable, is_plain

LONGEST = max(len(pattern.ops) for pattern in PATTERNS)


@dataclass(frozen=True)
class Fusion:
    """One chain of one forward, and what the swap did with it."""

    block: str  # the module whose forward calls the chain, as in named_modules(); "" is the model
    chain: str  # "bn1 → relu"; "" if the forward cannot be read
    into: str  # the fused module's class; "" if it was left
    reason: str  # why it was left; "" if fused


# The fused graphs of each block's new forward.
Graphs = dict[nn.Module, list[tuple[Recipe, fx.Graph]]]


@dataclass
class Plan:
    fusions: list[Fusion] = field(default_factory=list)
    classes: dict[nn.Module, type[nn.Module]] = field(default_factory=dict)  # keepers and blocks
    absorbed: dict[nn.Module, str] = field(default_factory=dict)  # layers into which fused module
    graphs: Graphs = field(default_factory=dict)
    blocks: dict[nn.Module, list[Block]] = field(default_factory=dict)  # all that was traced


WhyNot = Callable[[nn.Module], "str | None"]


def plan(
    model: nn.Module, why_not: WhyNot, ops: Iterable[str], whole: Container[nn.Module] = ()
) -> Plan:
    """What to fuse in ``model``. Changes nothing.

    Args:
        why_not: returns the reason to leave a layer native, or None.
        ops: the functionals that may be replaced.
        whole: modules whose forward is left as it is.
    """
    result = Plan()
    for name, module in model.named_modules():
        chains = may_have_chains(module)
        if module in whole or not (chains or may_be_rewritten(module)):
            continue
        try:
            reason = why_no_block(module)
            if reason is not None:
                raise NotTraceable(reason)
            _fuse_module(name, module, why_not, {*ops, *ONLY_FUSED}, result)
        except NotTraceable as error:
            if chains:
                result.fusions.append(Fusion(name, "", "", str(error)))
    return result


def _fuse_module(
    name: str, module: nn.Module, why_not: WhyNot, ops: set[str], result: Plan
) -> None:
    """Fuses all graphs of ``module``'s forward. A layer becomes the same fused module in each."""
    classes: dict[nn.Module, type[nn.Module]] = {}
    absorbed: dict[nn.Module, str] = {}
    fusions: list[Fusion] = []
    graphs = []
    blocks = []
    for form in forms(module):
        block = Block(name, module, why_not, ops, form, {**result.classes, **classes})
        block.fuse()
        blocks.append(block)
        _add_fusions(fusions, block.fusions)
        if block.replaced:
            graphs.append((block.recipe(), block.graph))
            classes.update(block.classes)
            absorbed.update(block.absorbed)
    if graphs:
        try:
            classes[module] = block_class(type(module), tuple(recipe for recipe, _ in graphs))
        except Exception as error:  # a metaclass, ...
            raise NotTraceable(f"its forward can't be rewritten: {error}") from error
        result.classes.update(classes)
        result.absorbed.update(absorbed)
        result.graphs[module] = graphs
    result.blocks[module] = blocks
    result.fusions += fusions


def _add_fusions(known: list[Fusion], found: list[Fusion]) -> None:
    """Adds the chains of one more graph. A chain that is fused in one graph counts as fused."""
    places = {fusion.chain: i for i, fusion in enumerate(known)}
    for fusion in found:
        i = places.get(fusion.chain)
        if i is None:
            known.append(fusion)
        elif not fusion.reason:
            known[i] = fusion


class Block:
    """One graph of a module's forward, and the chains fused in it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        why_not: WhyNot,
        ops: set[str],
        form: Form,
        known: dict[nn.Module, type[nn.Module]],
    ) -> None:
        self.name, self.module, self.known = name, module, known
        self.why_not, self.ops = why_not, ops
        self.form = form
        self.graph = form.traced.graph
        self.layers: dict[str, Layer] = {}  # that the new forward calls differently, by path
        self.replaced: set[fx.Node] = set()
        self.classes: dict[nn.Module, type[nn.Module]] = {}
        self.absorbed: dict[nn.Module, str] = {}
        self.fusions: list[Fusion] = []

    def fuse(self) -> None:
        for node in list(self.graph.nodes):
            head = None if node in self.replaced else self._step(node, None)
            if head is None:
                continue
            pattern, steps, reason = self._match(head)
            if pattern is not None:
                reason = self._fuse_chain(pattern, steps)
            elif isinstance(self.module, nn.Sequential) and self._convolution(ALONE, [head]):
                self._fuse_chain(ALONE, [head])
            if reason or pattern is not None:
                chain = " → ".join(label(s.node) if s.layer else s.op for s in steps)
                into = pattern.module if pattern is not None and not reason else ""
                self.fusions.append(Fusion(self.name, chain, into, reason))

    def _fuse_chain(self, pattern: Pattern, steps: list[Step]) -> str:
        """Fuses the chain, or returns the reason why not."""
        keeper = [step for step in steps if step.op][pattern.keeper]
        layer = keeper.layer
        if layer is not None:
            kind = KEEPERS[pattern, keeper.kinds[0]]
            known = {**self.known, **self.classes}.get(layer, type(layer))
            if known in KEEPER_LAYERS and known is not kind:
                return f"{label(keeper.node)} is already a {known.__name__}"
            self.classes[layer] = kind
        for step in steps:
            if step.layer is not None and step.op:
                self.absorbed[step.layer] = pattern.module
        self._replace(pattern, steps, keeper)
        return ""

    def _convolution(self, pattern: Pattern, steps: list[Step]) -> fx.Node | None:
        """The convolution whose output only this chain reads, if one op may compute both."""
        node = steps[0].node.args[0]
        if steps[0].op != "batch_norm" or steps[0].layer is None:
            return None
        if steps[0].why_not or (pattern, steps[0].kinds[0]) not in KEEPERS:
            return None
        if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.users) != 1:
            return None
        layer = self.module.get_submodule(str(node.target))
        if type(layer) not in CONVOLUTIONS or is_hooked(layer) or self.why_not(layer) is not None:
            return None
        plain = "conv2d" in self.ops and len(node.args) == 1 and not node.kwargs
        moves = not self._why_not_moved([Step(node, "conv2d", {}, layer), *steps])
        return node if plain and moves else None

    def _flatten_before(self, pattern: Pattern, steps: list[Step]) -> fx.Node | None:
        """The layer that flattens all but the batch, for a linear layer alone."""
        node = steps[0].node.args[0]
        if pattern.ops[0] != "linear" or steps[0].layer is None or not isinstance(node, fx.Node):
            return None
        if node.op != "call_module" or len(node.users) != 1 or len(node.args) != 1 or node.kwargs:
            return None
        layer = self.module.get_submodule(str(node.target))
        if type(layer) is not nn.Flatten or is_hooked(layer):
            return None
        moves = not self._why_not_moved([Step(node, "", {}, layer), *steps])
        return node if (layer.start_dim, layer.end_dim) == (1, -1) and moves else None

    def _product_after(self, pattern: Pattern, steps: list[Step]) -> list[Step]:
        """The linear layer that alone reads a linear layer's activation, after what does nothing."""
        if pattern.ops[0] != "linear" or steps[0].layer is None:
            return []
        found, node = [], steps[-1].node
        while len(node.users) == 1:
            (node,) = node.users
            step = self._step(node, None)
            if step is None or step.layer is None or step.why_not or step.op not in ("", "linear"):
                return []
            found.append(step)
            if not step.op:
                continue
            begins_a_chain = self._match(step)[0] is not None
            is_known = all(kind in OPERANDS for kind in step.kinds)
            moves = not self._why_not_moved([*steps, *found])
            return found if is_known and moves and not begins_a_chain else []
        return []

    # ---- what a node is ----

    def _step(self, node: fx.Node, previous: fx.Node | None) -> Step | None:
        """``node`` as an op on ``previous``, or on any tensor; None for another op."""
        if node.op == "call_module":
            return self._layer_step(node)
        if not node.args:
            return None
        if node.op == "call_function" and node.target in FUNCTIONS:
            op, names = FUNCTIONS[node.target]
        elif node.op == "call_method" and node.target in METHODS:
            op, names = METHODS[str(node.target)]
        else:
            return None
        options = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
        step = Step(node, op, options)
        if op == "add":
            self._add_step(step, previous)
        elif is_dilated(options):
            step.why_not = f"{label(node)} has dilated windows"
        elif op not in self.ops:
            step.why_not = f"{op} is not in ops"
        return step

    def _layer_step(self, node: fx.Node) -> Step | None:
        layer = self.module.get_submodule(str(node.target))
        base = next((kind for kind in KINDS if isinstance(layer, kind)), None)
        if base is None:
            return None
        theirs, mine, op, names, constants = KINDS[base]
        if base is nn.Dropout and layer.p != 0:
            return None
        options = {**{name: getattr(layer, name) for name in names}, **constants}
        step = Step(node, op, options, layer, (theirs, mine), frozenset(constants))
        reason = self.why_not(layer)
        if reason is not None:
            step.why_not = f"{label(node)}: {reason}"
        elif is_hooked(layer):
            step.why_not = f"a hook on {label(node)}"
        elif len(node.args) != 1 or node.kwargs:
            step.why_not = f"{label(node)} is called with more than its input"
        elif options.get("return_indices"):
            step.why_not = f"{label(node)} returns indices"
        elif is_dilated(options):
            step.why_not = f"{label(node)} has dilated windows"
        elif not all(is_plain(value) for value in step.options.values()):
            step.why_not = f"{label(node)} has options that are no plain values"
        return step

    def _add_step(self, step: Step, previous: fx.Node | None) -> None:
        first, other = step.node.args[0], step.options.pop("other", None)
        residual = other if first is previous else first
        if not isinstance(residual, fx.Node) or residual is previous:
            step.why_not = "the addition is not of two tensors"
        elif step.options.pop("alpha", 1) != 1 or step.options:
            step.why_not = "the addition has further arguments"
        elif step.in_place and first is not previous:
            step.why_not = f"the addition writes into {label(residual)}"
        else:
            step.residual = residual

    # ---- what is fused ----

    def _match(self, head: Step) -> tuple[Pattern | None, list[Step], str]:
        """The longest pattern at ``head``. If there is none: the nearest chain, and what it lacks."""
        steps, why = self._follow(head)
        real = [step for step in steps if step.op]
        patterns = [p for p in PATTERNS if p.ops[0] == head.op]
        reason = ""
        near: list[Step] = []
        for pattern in patterns:
            if tuple(step.op for step in real[: len(pattern.ops)]) != pattern.ops:
                continue
            chain = steps[: steps.index(real[len(pattern.ops) - 1]) + 1]
            blocked = next((step.why_not for step in chain if step.why_not), "")
            blocked = blocked or self._why_not_moved(chain)
            if not blocked:
                return pattern, chain, ""
            reason, near = reason or blocked, near or chain
        if near:
            return None, near, reason
        return None, *self._near_miss(steps, patterns, why)

    def _follow(self, head: Step) -> tuple[list[Step], str]:
        """The ops from ``head`` on, each the only consumer of the previous one."""
        steps, real, node = [head], 1, head.node
        while real < LONGEST:
            if len(node.users) != 1:
                count = len(node.users)
                return steps, f"the result of {label(node)} has {count} consumers"
            (following,) = node.users
            step = self._step(following, node)
            if step is None:
                return steps, f"{label(following)} stands between"
            steps.append(step)
            real += bool(step.op)
            node = following
        return steps, ""

    def _near_miss(
        self, steps: list[Step], patterns: list[Pattern], why: str
    ) -> tuple[list[Step], str]:
        """The chain that only ``why`` prevents; none if no pattern has begun."""
        last = steps[-1].node
        done = tuple(step.op for step in steps if step.op)
        begun = [p for p in patterns if p.ops[: len(done)] == done and len(p.ops) > len(done)]
        if not begun or not why:
            return [], ""
        following = list(last.users)
        if len(following) == 1:  # another op; the wanted one may follow it
            following = list(following[0].users)
        wanted = {p.ops[len(done)] for p in begun} - {"add"}
        for node in following:
            step = self._step(node, last)
            if step is not None and step.op in wanted:
                return [*steps, step], why
        return [], ""

    def _why_not_moved(self, chain: list[Step]) -> str:
        """Who else would notice that the head is computed later, at the last op, or not in place."""
        head = chain[0].node
        writer = self.writer_between(head, chain[-1].node, {step.node for step in chain})
        if writer is not None:
            return f"{label(writer)} works in place in between"
        if self.may_write(head):
            source = head.args[0]
            if not isinstance(source, fx.Node) or not self._is_alone(source):
                return f"{label(head)} works in place, others may see its input"
        return ""

    def _is_alone(self, node: fx.Node) -> bool:
        """Whether no other tensor shares ``node``'s memory, and only one op reads it."""
        if node.op != "call_module" or len(node.users) != 1:
            return False
        return isinstance(self.module.get_submodule(str(node.target)), MAKES_NEW)

    def may_write(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            layer = self.module.get_submodule(str(node.target))
            return any(getattr(m, "inplace", False) for m in layer.modules())
        return is_in_place(node)

    def writer_between(
        self, first: fx.Node, last: fx.Node, known: Collection[fx.Node] = ()
    ) -> fx.Node | None:
        """The node after ``first`` and before ``last`` that may write into a tensor; ``known`` may."""
        node = first
        while node is not last:
            if node is not first and node not in known and self.may_write(node):
                return node
            node = node.next
        return None

    def depend_on(
        self,
        path: str,
        kinds: tuple[type[nn.Module], ...],
        options: tuple[tuple[str, Any], ...] = (),
        may_be_cut: bool = False,
    ) -> None:
        """The graph holds while the layer at ``path`` is of ``kinds`` and has these ``options``."""
        self.layers[path] = Layer(tuple(path.split(".")), kinds, options, may_be_cut)

    def _replace(self, pattern: Pattern, steps: list[Step], keeper: Step) -> None:
        convolution = self._convolution(pattern, steps)
        flatten = self._flatten_before(pattern, steps)
        after = self._product_after(pattern, steps)
        last = (after or steps)[-1].node
        inputs = [(convolution or flatten or steps[0].node).args[0]]
        options: dict[str, Any] = {} if flatten is None else {"flatten": True}
        for step in steps:
            if step.residual is not None:
                inputs.append(step.residual)
                options["in_place"] = step.in_place
            if step is not keeper or step.layer is None:
                options |= {name: step.options[name] for name in step.passed}
        with self.graph.inserting_before(last):
            if convolution is not None:
                options["conv"] = self.graph.get_attr(str(convolution.target))
            if after:
                options["then"] = self.graph.get_attr(str(last.target))
            if keeper.layer is not None:
                path = str(keeper.node.target)
                fused = self.graph.call_module(path, tuple(inputs), {"fused": options})
            else:
                function = getattr(F, pattern.functional)
                fused = self.graph.call_function(function, tuple(inputs), options)
        last.replace_all_uses_with(fused)
        for step in reversed([*steps, *after]):
            self.graph.erase_node(step.node)
        self.replaced.update(step.node for step in (*steps, *after))
        if convolution is not None:
            self.graph.erase_node(convolution)
            self.depend_on(str(convolution.target), CONVOLUTIONS)
        if flatten is not None:
            self.graph.erase_node(flatten)
            whole_image = (("start_dim", 1), ("end_dim", -1))
            self.depend_on(str(flatten.target), (nn.Flatten,), whole_image)
        for step in (*steps, *after):
            if step.layer is not None:
                kinds, held = step.kinds, tuple(step.held.items())
                if step is keeper:
                    kinds, held = (KEEPERS[pattern, kinds[0]],), ()
                self.depend_on(str(step.node.target), kinds, held)

    def recipe(self) -> Recipe:
        call, free = self.form.traced.call, self.form.free
        kinds = [
            kind_of(self.graph, name) if value is STAND_IN else "constant"
            for name, value in call.values
        ]
        try:
            source, imports = source_of(self.graph)
        except Exception as error:  # a function without a name, ...
            raise NotTraceable(f"its forward can't be rewritten: {error}") from error
        return Recipe(
            source,
            imports,
            tensors=tuple(i for i, kind in enumerate(kinds) if kind == "tensor"),
            sequences=tuple(
                i
                for i, (name, _) in enumerate(call.values)
                if kinds[i] == "tensors" or (kinds[i] == "any" and name not in free)
            ),
            constants=tuple(
                (i, value) for i, (_, value) in enumerate(call.values) if kinds[i] == "constant"
            ),
            takes_rest=REST in free,
            facts=self.form.traced.facts,
            layers=tuple(self.layers.values()),
            containers=tuple(self._containers()),
        )

    def _containers(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Lists of layers that the forward iterates: their lengths are frozen in the graph."""
        if isinstance(self.module, nn.Sequential):
            yield (), tuple(self.module._modules)
        paths = {
            tuple(path.split(".")[:-1])
            for path in (
                *(str(node.target) for node in self.graph.nodes if node.op == "call_module"),
                *self.layers,
            )
        }
        for path in sorted(paths - {()}):
            yield path, tuple(self.module.get_submodule(".".join(path))._modules)
