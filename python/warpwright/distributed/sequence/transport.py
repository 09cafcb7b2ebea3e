"""How keys, values and their gradients travel between the ranks of a ring.

`Messages` are point-to-point messages of the process group: any backend, any hosts. NCCL sends them with
kernels. Those wait for SMs, and the kernels of attention occupy all of them until they end.

`PeerCopies` write into the memory of another GPU of the host with the copy engines, which need no SM.
The memory is torch's symmetric memory: two slots for keys and two for gradients on each GPU. A transfer
takes the slots of its kind in turn. It ends with a barrier of all ranks, which says two things:

- all copies of this transfer have arrived,
- every rank has used what the transfer before it brought: the other slot may be written.

So a rank waits for a transfer before it begins the next one of the same kind.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients
# Also the first of two tags each: both kinds may be under way between the same two ranks.
KEYS, GRADIENTS = 1, 3
KINDS = (KEYS, GRADIENTS)
ALIGNMENT = 256  # bytes, of each tensor in a slot


@dataclass(frozen=True)
class Shapes:
    """Of a message: (B, heads, keys, D) and (B, heads, keys, D_v)."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(k: Tensor, v: Tensor, heads: int, keys: int) -> Shapes:
        k_shape, v_shape = ((x.shape[0], heads, keys, x.shape[3]) for x in (k, v))
        return Shapes(k_shape, v_shape, k.dtype, k.device)

    def empty(self) -> Pair:
        return (
            torch.empty(self.k, dtype=self.dtype, device=self.device),
            torch.empty(self.v, dtype=self.dtype, device=self.device),
        )

    @property
    def v_offset(self) -> int:
        """Bytes from the beginning of a slot."""
        return _aligned(self.k, self.dtype)

    @property
    def bytes(self) -> int:
        return self.v_offset + _aligned(self.v, self.dtype)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Transfer:
    """Two tensors out and two in, under way. It holds what is sent until it has been waited for."""

    finish: Callable[[], None]  # CUDA: the current stream waits; gloo: the caller does
    sent: Pair | None
    received: Pair | None

    def wait(self) -> Pair | None:
        self.finish()
        self.sent = None
        return self.received


class Transport(Protocol):
    def begin(self, largest: Shapes) -> None:
        """Before the transfers of a call, on all ranks. ``largest``: of any of its messages."""

    def exchange(
        self, send: Pair | None, to: int, receive: Shapes | None, source: int, kind: int
    ) -> Transfer:
        """Starts two tensors out and two in; either pair may be absent. All ranks call it together.

        ``to``, ``source``: ranks of the group. What comes is valid until the transfer after the next
        one of its kind begins.
        """


@dataclass(frozen=True)
class Messages:
    group: dist.ProcessGroup

    def begin(self, largest: Shapes) -> None:
        pass

    def exchange(
        self, send: Pair | None, to: int, receive: Shapes | None, source: int, kind: int
    ) -> Transfer:
        asked, received = [], receive.empty() if receive is not None else None
        for function, pair, peer in ((dist.isend, send, to), (dist.irecv, received, source)):
            peer = dist.get_global_rank(self.group, peer)
            for i, tensor in enumerate(pair or ()):
                asked.append(dist.P2POp(function, tensor, peer, self.group, kind + i))
        works = dist.batch_isend_irecv(asked) if asked else []

        def finish() -> None:
            for work in works:
                work.wait()

        return Transfer(finish, send, received)


@dataclass
class PeerMemory:
    """A group's slots on this GPU, and a view of those of the other ranks. It grows with the calls."""

    device: torch.device
    stream: torch.cuda.Stream
    flag: Tensor  # of the barrier; its value is always 0
    slot_bytes: int = 0
    tensor: Tensor | None = None  # owns this GPU's slots
    memory: Any = None  # torch's handle of the slots of all ranks

    @property
    def bytes(self) -> int:
        return 2 * len(KINDS) * self.slot_bytes

    def grow(self, slot_bytes: int, group: dist.ProcessGroup) -> None:
        """A collective, with the same size on all ranks."""
        import torch.distributed._symmetric_memory as symmetric

        if slot_bytes <= self.slot_bytes:
            return
        self.memory, self.tensor, self.slot_bytes = None, None, slot_bytes
        with _without_multicast():
            self.tensor = symmetric.empty(self.bytes, dtype=torch.uint8, device=self.device)
            self.memory = symmetric.rendezvous(self.tensor, group)

    def slot(self, rank: int, kind: int, turn: int, shapes: Shapes) -> Pair:
        begin = (2 * KINDS.index(kind) + turn % 2) * self.slot_bytes
        size = shapes.dtype.itemsize
        k, v = (
            self.memory.get_buffer(rank, shape, shapes.dtype, (begin + offset) // size)
            for shape, offset in ((shapes.k, 0), (shapes.v, shapes.v_offset))
        )
        return k, v

    def push(self, sources: Pair, targets: Pair) -> Callable[[], None]:
        """Copies after the current stream's work. The result makes the current stream wait for it."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)  # contiguous on both sides: no kernel
        pushed = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(pushed)


@dataclass
class PeerCopies:
    """One call's transfers. GPUs of one host, process groups with NCCL."""

    group: dist.ProcessGroup
    peers: PeerMemory
    turns: dict[int, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def _barrier(self) -> None:
        """A message of NCCL: `guard` can abort it if a rank is dead, which a waiting kernel of the
        symmetric memory would outlive."""
        dist.all_reduce(self.peers.flag, group=self.group)

    def begin(self, largest: Shapes) -> None:
        self.peers.grow(largest.bytes, self.group)
        self._barrier()  # the slots that the call before this one used are free

    def exchange(
        self, send: Pair | None, to: int, receive: Shapes | None, source: int, kind: int
    ) -> Transfer:
        peers, turn = self.peers, self.turns[kind]
        self.turns[kind] += 1
        wait_for_push = None
        if send is not None:
            k_shape, v_shape = (tuple(x.shape) for x in send)
            shapes = Shapes(k_shape, v_shape, send[0].dtype, peers.device)
            wait_for_push = peers.push(send, peers.slot(to, kind, turn, shapes))
        received = None
        if receive is not None:
            received = peers.slot(dist.get_rank(self.group), kind, turn, receive)

        def finish() -> None:
            if wait_for_push is not None:
                wait_for_push()
            self._barrier()

        return Transfer(finish, send, received)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """torch adds a multicast object to symmetric memory, which nothing here uses."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# None: messages.
_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory | None] = (
    weakref.WeakKeyDictionary()
)


def choose(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """A collective at the group's first call: copies if every GPU can write to every other one."""
    if group not in _memories:
        _memories[group] = None
        if device.type == "cuda" and _all_reach_all(group, device):
            stream = torch.cuda.Stream(device)
            _memories[group] = PeerMemory(device, stream, torch.zeros(1, device=device))
    peers = _memories[group]
    return Messages(group) if peers is None else PeerCopies(group, peers)


def peer_memory_bytes(group: dist.ProcessGroup) -> int:
    """What this GPU holds for `PeerCopies`, outside of torch's caching allocator."""
    peers = _memories.get(group)
    return 0 if peers is None else peers.bytes


def _all_reach_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    if dist.get_world_size(group) == 1 or "nccl" not in str(dist.get_backend_config(group)):
        return False
    uuids: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(uuids, _uuid(device), group=group)
    answers: list[Any] = [None] * len(uuids)
    dist.all_gather_object(answers, _reaches(device, uuids), group=group)
    return all(answers)


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _reaches(device: torch.device, uuids: list[str]) -> bool:
    """Each rank has a GPU of its own, which this process sees and ``device`` can write to."""
    visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
    others = [uuid for uuid in uuids if uuid != _uuid(device)]
    if len(set(others)) != len(uuids) - 1:
        return False
    return all(
        uuid in visible and torch.cuda.can_device_access_peer(device, visible[uuid])
        for uuid in others
    )
