"""Changes of traced forwards besides chains: norms, views, shortcuts, functions, layer scale,
concatenations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

from torch import nn

from . import cats, scales
from .blocks import block_class
from .cats import CatPass
from .classes import forward_of
from .functions import FunctionPass
from .fuse import Fusion, Plan
from .joins import JoinPass
from .norms import NormPass
from .residual import block_of
from .scales import ScalePass, begins_with_a_cast
from .trace import NotTraceable
from .views import INTO, ViewPass


def plan_rewrites(
    model: nn.Module,
    chosen: Mapping[nn.Module, type[nn.Module]],
    found: Plan,
    ops: Collection[str],
    why_left: Callable[[nn.Module, str], str | None],
) -> dict[nn.Module, str]:
    """Adds the changes to ``found``. Returns a remark on each norm and convolution.

    Args:
        chosen: the classes that layers get anyway.
        ops: what the user wants swapped.
        why_left: the user's reason to leave a module as it is, or None.
    """
    names = {module: name for name, module in model.named_modules()}
    notes: dict[nn.Module, str] = {}

    def kind_of(layer: nn.Module) -> type[nn.Module]:
        return found.classes.get(layer) or chosen.get(layer, type(layer))

    followers = _followers(model)

    def copies(module: nn.Module) -> bool:
        after = followers.get(module, [])
        graphs = [[graph for _, graph in found.graphs.get(m, [])] for m in after]
        return bool(after) and all(any(map(begins_with_a_cast, of_one)) for of_one in graphs)

    # Inner modules first: an outer one depends on the classes that they get. Later ones first: what
    # a block writes depends on the block after it.
    for module, blocks in reversed([*found.blocks.items()]):
        name = names[module]
        if block_of(type(module)) is not None or why_left(module, name):
            continue
        if not any(child in chosen for child in module.modules()):
            continue
        norms = [NormPass(block, kind_of) for block in blocks]
        views = [ViewPass(block) for block in blocks]
        joins = [JoinPass(block, kind_of) for block in blocks]
        calls = [FunctionPass(block, ops) for block in blocks]
        scaled = [ScalePass(block, kind_of, copies(module)) for block in blocks]
        concatenated = [CatPass(block, kind_of) for block in blocks]
        passes = zip(norms, views, joins, calls, scaled, concatenated, strict=True)
        changed = [sum(p.run() for p in of_block) > 0 for of_block in passes]  # all run
        if True not in changed:
            continue
        kept = [b for b, c in zip(blocks, changed, strict=True) if c or b.replaced]
        try:
            recipes = tuple(block.recipe() for block in kept)
            made = block_class(type(module), recipes)
        except (NotTraceable, TypeError, ValueError):  # a metaclass, a function without a name, ...
            continue
        found.classes[module] = made
        found.graphs[module] = [(r, block.graph) for r, block in zip(recipes, kept, strict=True)]
        for norm in norms:
            notes.update(norm.notes)
        for join in joins:
            notes.update(join.notes)
        chains = dict.fromkeys(chain for b in views for chain in b.chains)
        found.fusions += [Fusion(name, chain, INTO, "") for chain in chains]
        chains = dict.fromkeys(chain for b in concatenated for chain in b.chains)
        found.fusions += [Fusion(name, chain, cats.INTO, "") for chain in chains]
        called = {chain: into for call in calls for chain, into in call.chains.items()}
        found.fusions += [Fusion(name, chain, into, "") for chain, into in called.items()]
        for scale in scaled:
            found.absorbed.update(dict.fromkeys(scale.absorbed, scales.INTO))
        if any(scale.count for scale in scaled):
            found.fusions.append(Fusion(name, scales.CHAIN, scales.INTO, ""))
    return notes


def _followers(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """What reads the output of a module in an ``nn.Sequential``, wherever it stands."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        if forward_of(type(module)) is nn.Sequential.forward:
            for first, second in itertools.pairwise(module.children()):
                found.setdefault(first, []).append(second)
    return found
