"""A sharding rule is a table of placements; this file makes DTensor's strategy from it.

A row of a table has the placements of an operator's tensors over *one* dimension of the mesh. First
come those of the results, then those of the tensor arguments, in the schema's order. None is for a
tensor that is absent. DTensor combines the rows over all dimensions of the mesh and takes the combination
that moves the fewest bytes.

`torch.distributed.tensor.experimental.register_sharding` cannot express these rules. Its cache
ignores the arguments before the first integer, and a mask of wanted gradients is such an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import (
    expand_to_full_mesh_op_strategy,
    register_op_strategy,
)
from torch.distributed.tensor.placement_types import Placement

R = Replicate()
P = Partial()
S = Shard
# Placements of the results and of the tensor arguments over one dimension of the mesh.
Row = tuple[Sequence[Placement | None], Sequence[Placement | None]]


@dataclass(frozen=True)
class Rule:
    """How one operator is sharded.

    ``rows`` takes the operator's arguments, tensors as their DTensorSpec, and returns the table.
    """

    rows: Callable[..., list[Row]]
    # Tensors that are never gathered from their shards: a call that needs it raises.
    kept: tuple[str, ...] = ()
    # Tensors that the operator writes into: a copy with other placements would lose the values.
    written: tuple[str, ...] = ()
    advice: str = ""  # what to do instead, for the error
    divides: Callable[..., bool] | None = None  # whether these input specs fit each other
    shape_at: int | None = None  # an argument with the result's global shape


def all_replicated(outputs: int, inputs: int) -> Row:
    return [R] * outputs, [R] * inputs


def _complete(op: Any, args: Sequence[Any]) -> list[Any]:
    """With the defaults of trailing arguments, which the dispatcher leaves out."""
    return [*args, *(a.default_value for a in op._schema.arguments[len(args) :])]


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def first_static(op: Any) -> int:
    """The first argument that decides placements besides the tensors that are always there."""
    arguments = op._schema.arguments
    return next((i for i, a in enumerate(arguments) if str(a.type) != "Tensor"), len(arguments))


def _words(spec: DTensorSpec) -> str:
    """Placements as a reader of docs/distributed.md knows them."""
    names = [
        f"Shard({p.dim})"
        if isinstance(p, Shard)
        else "Replicate"
        if p.is_replicate()
        else "Partial"
        for p in spec.placements
    ]
    return f"({', '.join(names)})"


def _error(op: Any, rule: Rule, names: list[str], specs: list[DTensorSpec]) -> str:
    came = ", ".join(
        f"{name} {_words(spec)} of shape {tuple(spec.shape)}"
        for name, spec in zip(names, specs, strict=True)
    )
    kept = " and ".join(dict.fromkeys((*rule.kept, *rule.written)))
    text = f"{op._schema.name.removeprefix('warpwright::')}: no way to compute on these shards"
    text += f" without a gather of {kept}" if kept else ""
    return f"{text}: got {came}. {rule.advice}".rstrip()


def strategy_of(op: Any, rule: Rule) -> Callable[[OpSchema], OpStrategy]:
    """DTensor's strategy function of `op`."""
    arguments = op._schema.arguments
    places = [i for i, argument in enumerate(arguments) if _is_tensor(argument)]

    def strategy(schema: OpSchema) -> OpStrategy:
        args = [
            a.strategies[0].output_spec if isinstance(a, OpStrategy) else a
            for a in _complete(op, schema.args_schema)
        ]
        present = [i for i in places if isinstance(args[i], DTensorSpec)]
        names = [arguments[i].name for i in present]
        specs: list[DTensorSpec] = [args[i] for i in present]
        table = []
        for outputs, inputs in rule.rows(*args):
            placed = dict(zip(places, inputs, strict=True))
            row = [*outputs, *(placed[i] for i in present)]
            if row not in table:
                table.append(row)

        def is_valid(inputs: list[DTensorSpec], _: Any) -> bool:
            for name, now, then in zip(names, specs, inputs, strict=True):
                if name in rule.written and now.placements != then.placements:
                    return False
                if name in rule.kept and _unshards(now, then):
                    return False
            return rule.divides is None or rule.divides(args, dict(zip(names, inputs, strict=True)))

        result = expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(),
            schema,
            table,
            input_index=len(op._schema.returns),
            inplace_op=schema.is_inplace_op(),
            is_valid_strategy_cb=is_valid,
        )
        if not result.strategies:
            raise RuntimeError(_error(op, rule, names, specs))
        return result

    return strategy


def _unshards(now: DTensorSpec, then: DTensorSpec) -> bool:
    return any(
        a.is_shard() and a != b for a, b in zip(now.placements, then.placements, strict=True)
    )


def register(name: str, rule: Rule) -> None:
    """Gives DTensor the strategy of the operator `name`."""
    op = getattr(torch.ops.warpwright, name).default
    register_op_strategy(op, schema_info=RuntimeSchemaInfo(first_static(op)))(strategy_of(op, rule))
    if rule.shape_at is not None:
        propagator = DTensor._op_dispatcher.sharding_propagator
        propagator.op_to_shape_and_stride_idx[op] = rule.shape_at


def picked(mask: Sequence[bool], *placements: Placement | None) -> list[Placement | None]:
    """The placements of the gradients that `mask` wants; DTensor expects None for the others."""
    return [p if wanted else None for p, wanted in zip(placements, mask, strict=True)]
