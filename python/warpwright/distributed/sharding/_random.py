"""Operators that draw random numbers: by an element's number in the whole tensor, or per shard."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _local


def drawn_per_shard(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A handler for attention, which counts heads and batch from 0 on every rank.

    With dropout, ranks with different shards draw from different parts of the generator's stream,
    replicas from the same. Afterwards all generators have advanced alike, as they must for the next call.
    """
    dropout_p = args[4]
    info, sharding = _arranged(op, args, kwargs)
    dispatcher = DTensor._op_dispatcher
    if dropout_p == 0.0:
        return dispatcher.wrap(op(*info.local_args, **info.local_kwargs), sharding.output_spec)
    index, count = _local.shard_of(sharding.output_spec[0])
    with _Stream(info.local_args[0].device, index, count):
        results = op(*info.local_args, **info.local_kwargs)
    return dispatcher.wrap(results, sharding.output_spec)


def numbered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A handler for dropout and its backward: every shard has its part of the whole tensor's mask.

    All generators are in the same state, before and after. So the mask depends on no placement, and the
    gradient may come in another one than the output had.
    """
    info, sharding = _arranged(op, args, kwargs)
    specs = sharding.output_spec
    spec = specs[0] if isinstance(specs, (tuple, list)) else specs
    place = _local.place_in_whole(spec.shape, spec.mesh, spec.placements)
    operands = info.local_args[: len(op._schema.arguments) - 1]  # all but the place
    return DTensor._op_dispatcher.wrap(op(*operands, place), specs)


def _arranged(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The call on local tensors, placed by the operator's table, and its sharding."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    assert sharding is not None
    if sharding.needs_redistribute:
        assert sharding.redistribute_schema is not None
        dispatcher.redistribute_local_args(
            info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    return info, sharding


class _Stream:
    """Inside, the device's default generator is where shard `index` of `count` draws."""

    STEP = 4  # what one call of the op advances a GPU's generator by

    def __init__(self, device: torch.device, index: int, count: int) -> None:
        self.device, self.index, self.count = device, index, count

    def __enter__(self) -> None:
        self._skip(self.index)

    def __exit__(self, *_: Any) -> None:
        self._skip(self.count - 1 - self.index)

    def _skip(self, calls: int) -> None:
        if calls <= 0:
            return
        if self.device.type == "cuda":
            index = self.device.index or 0
            generator = torch.cuda.default_generators[index]
            generator.set_offset(generator.get_offset() + self.STEP * calls)
        else:
            # A call draws 64 bits from the CPU's generator; random_() of an int64 draws as many.
            torch.empty(calls, dtype=torch.int64).random_()
