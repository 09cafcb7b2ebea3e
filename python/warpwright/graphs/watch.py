"""Names what a CUDA graph cannot hold, while the step runs.

A dispatch mode sees every op of the step, also those of the backward. It watches a capture that is
dropped, and raises before CUDA does: CUDA's error names no op, and some faults are none for CUDA. A
replay then repeats what the CPU had computed once.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class CaptureError(RuntimeError):
    """A step that no CUDA graph can hold, or whose replay differs from the eager step."""


# Packets of ops that wait for the GPU: their result is a number or a shape on the host.
READS = {
    aten._local_scalar_dense: "reads a tensor's value, as .item(), float() and bool() do",
    aten.is_nonzero: "reads a tensor's value, as bool() does",
    aten.equal: "compares two tensors on the host",
}
SHAPES = {
    *(aten.nonzero, aten.masked_select, aten.unique_consecutive, aten._unique, aten._unique2),
    *(aten.unique_dim, aten.bincount, aten.argwhere),
}
COPIES = {aten._to_copy, aten.copy_, aten._copy_from}
# Ops on CPU tensors that fix no value: they make one from numbers, or only describe it.
MAKES = {
    *(aten.empty, aten.empty_strided, aten.scalar_tensor, aten.full, aten.zeros, aten.ones),
    *(aten.lift_fresh, aten.lift_fresh_copy, aten.detach, aten.detach_, aten.arange, aten.alias),
}
BOOLEAN = (torch.bool, torch.uint8)


class Watch(TorchDispatchMode):
    """Collects what a graph cannot hold; or raises at once.

    Args:
        device: that of the step; on a CPU only what would stop a capture on a GPU is found.
        raises: whether to raise ``CaptureError`` at the first finding.
    """

    def __init__(self, device: torch.device, raises: bool) -> None:
        super().__init__()
        self.device, self.raises = device, raises
        self.found: list[str] = []
        # Those that ops were given, each time as another Python object.
        self.generators: list[torch.Generator] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None:
            self.generators.append(generator)
        words = self._fault(func, args, kwargs)
        if words:
            self._add(words, func)
        return func(*args, **kwargs)

    def _fault(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        packet = func.overloadpacket
        if packet in READS:
            return READS[packet]
        if packet in SHAPES:
            return "makes a tensor whose shape depends on values"
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices = [i for i in tree_leaves(args[1:2]) if isinstance(i, Tensor)]
            if any(i.dtype in BOOLEAN for i in indices):
                return "indexes by a mask, whose shape depends on values: torch.where has none"
        if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            return "makes a tensor whose shape depends on values: pass output_size"
        return self._host_fault(packet, args, kwargs) if self.device.type != "cpu" else ""

    def _host_fault(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_host = [t for t in tensors if t.device.type == "cpu"]
        target = kwargs.get("device")
        if packet in COPIES:
            if target is not None and torch.device(target).type == "cpu" and tensors:
                return "copies a tensor to the CPU"
            if on_host and (len(on_host) < len(tensors) or target is not None):
                return "copies a CPU tensor to or from the GPU: pass it as an input of the step"
        if on_host and packet not in MAKES:
            shapes = ", ".join(str(tuple(t.shape)) for t in on_host[:3])
            return f"computes with a CPU tensor (shape {shapes}): a replay repeats its value of now"
        return ""

    def _add(self, words: str, func: Any) -> None:
        said = f"{place()}: {func.overloadpacket} {words}"
        if said not in self.found:
            self.found.append(said)
        if self.raises:
            raise CaptureError(f"a CUDA graph can't hold the step: {said}")


def place() -> str:
    """The innermost line outside of torch and of this package; "the backward" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        inside = "/torch/" in path or "/warpwright/graphs/" in path or path.startswith("<")
        if not inside and frame.name != "place" and "/threading.py" not in path:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return "the backward"


@contextmanager
def no_draws_on_the_host() -> Iterator[None]:
    """Raises if the block drew random numbers on the host: a replay would repeat them."""
    before = _host_states()
    yield
    after = _host_states()
    drew = [name for name, state in before.items() if state != after[name]]
    if drew:
        raise CaptureError(
            f"a CUDA graph can't hold the step: it draws from {' and '.join(drew)}, on the host; every "
            "replay would repeat what was drawn in the capture"
        )


def _host_states() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    states["torch's CPU generator"] = torch.get_rng_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy.random"] = repr(numpy.random.get_state(legacy=False))
    return states
