"""How the tokens of a sequence lie on the ranks, and which keys a block of queries attends to.

With n ranks and a sequence of S tokens, every rank holds L = S / n of them:

- ``contiguous`` (Liu et al. 2023, arXiv 2310.01889): rank r holds tokens rL to rL + L - 1. Under the
  causal rule the last rank has 2n / (n + 1) times the mean work.
- ``zigzag`` (Llama 3, arXiv 2407.21783): the sequence is cut into 2n chunks; rank r holds chunks r and
  2n - 1 - r. Every step of a causal ring has the same work on every rank.
- ``striped`` (Brandon et al. 2023, arXiv 2311.09431): rank r holds tokens r, r + n, r + 2n, ... Every
  step is a causal triangle, so each rank computes half a tile more per row of tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
LAYOUTS = ("contiguous", "zigzag", "striped")


def group_of(group: Group) -> dist.ProcessGroup:
    """The process group of a 1-D mesh; None is the default group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of 1 dimension, got {group.ndim}")
        return group.get_group()
    if group is not None:
        return group
    if not dist.is_initialized():
        raise RuntimeError("group: expected torch.distributed.init_process_group() to have run")
    default = dist.group.WORLD
    assert default is not None
    return default


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}; got {layout!r}")


def check_length(length: int, ranks: int, layout: str) -> None:
    """``length`` is the whole sequence's."""
    check_layout(layout)
    parts = 2 * ranks if layout == "zigzag" else ranks
    if length % parts != 0:
        raise ValueError(
            f"length: expected a multiple of {parts} tokens for {ranks} ranks in the {layout} "
            f"layout, got {length}"
        )


def token_order(length: int, ranks: int, layout: str) -> Tensor:
    """(ranks, length / ranks): the positions in the sequence of each rank's tokens, int64."""
    check_length(length, ranks, layout)
    tokens = torch.arange(length)
    if layout == "striped":
        return tokens.view(-1, ranks).T.contiguous()
    if layout == "zigzag":
        chunks = tokens.view(2 * ranks, -1)
        return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], dim=1)
    return tokens.view(ranks, -1)


def positions(
    length: int,
    group: Group = None,
    layout: str = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions in the sequence of this rank's tokens, for ``position_ids`` and rotary embeddings.

    Args:
        length: tokens of the whole sequence.
        group: the ranks that share the sequence: a process group or a mesh of 1 dimension.
        layout: ``"contiguous"``, ``"zigzag"`` or ``"striped"``.
    Returns:
        (length / ranks,), int64, on ``device``.
    Raises:
        ValueError: ``length`` is not a multiple of the ranks (zigzag: of twice the ranks).
    """
    group = group_of(group)
    return token_order(length, dist.get_world_size(group), layout)[dist.get_rank(group)].to(device)


def shard(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """This rank's tokens of a sequence that every rank holds whole.

    Args:
        x: the whole sequence, the same on every rank; any dtype.
        dim: the dimension of the tokens.
    Returns:
        A new tensor; the extent of ``dim`` is divided by the number of ranks. Gradients flow to the
        rank's own tokens of ``x``.
    Raises:
        ValueError: the extent is not a multiple of the ranks (zigzag: of twice the ranks).
    """
    return x.index_select(dim, positions(x.shape[dim], group, layout, x.device))


def unshard(x: Tensor, dim: int, group: Group = None, layout: str = "zigzag") -> Tensor:
    """The whole sequence of which `shard` gave the parts, on every rank. Without gradients.

    Every rank of ``group`` has to call it.
    """
    group = group_of(group)
    ranks = dist.get_world_size(group)
    order = token_order(x.shape[dim] * ranks, ranks, layout).flatten().argsort().to(x.device)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim).index_select(dim, order)


class Part(NamedTuple):
    """The rows of one rank's queries and the keys of another's that meet: one attention call."""

    rows: slice
    keys: slice
    is_causal: bool  # aligned at the top left of the two slices


EVERYTHING = slice(None)


def part(layout: str, is_causal: bool, rank: int, source: int, length: int) -> Part | None:
    """What ``rank``'s queries attend to among the keys of ``source``; None if nothing.

    ``length``: tokens per rank, of queries and of keys. Without the causal rule any lengths meet.
    """
    if not is_causal:
        return Part(EVERYTHING, EVERYTHING, False)
    if rank == source:
        return Part(EVERYTHING, EVERYTHING, True)
    if layout == "contiguous":
        return Part(EVERYTHING, EVERYTHING, False) if source < rank else None
    if layout == "zigzag":
        half = length // 2
        if source < rank:
            return Part(EVERYTHING, slice(0, half), False)
        return Part(slice(half, length), EVERYTHING, False)
    if source < rank:
        return Part(EVERYTHING, EVERYTHING, True)
    # A key with a higher offset in its stripe is hidden from the query of the same index.
    return Part(slice(1, length), slice(0, length - 1), True) if length > 1 else None


def extent(cut: slice, length: int) -> int:
    start, stop, _ = cut.indices(length)
    return stop - start
