"""What a training step changes: copies of it, and how two steps differ in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..optim._shards import local

# A replay may choose other kernels than the eager step, so its rounding may differ. Its change of all
# parameters may move by this much of the change, in the L2 norm.
MOVED = {torch.float32: 5e-2, torch.bfloat16: 2e-1, torch.float16: 2e-1}
LOSS = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
DRIFT_FACTOR = 4.0  # and by so much of the difference between two eager steps
FEW = 8  # one rounding may decide whether so few elements change
SHARE_OF_MEMORY = 4  # copies go to the host if they take more than a fourth of what is free


def changed_tensors(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once; this rank's shards of DTensors."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for i, module in enumerate(modules):
        prefix = "" if i == 0 else f"loss{i}." if i > 1 else "loss."
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[prefix + name] = local(tensor)
    return found


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of an optimizer's state; this rank's shards of DTensors."""
    found = [v for values in state.values() for v in values.values() if isinstance(v, Tensor)]
    return list(map(local, found))


def numbers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What is in an optimizer's state and is no tensor."""
    return [
        (name, value)
        for values in optimizer.state.values()
        for name, value in values.items()
        if not isinstance(value, Tensor)
    ]


def _clone(tensor: Tensor, host: bool) -> Tensor:
    return tensor.detach().to("cpu", copy=True) if host else tensor.detach().clone()


class Snapshot:
    """Copies of tensors and of the generators' states. ``restore()`` writes them back."""

    def __init__(self, tensors: Iterable[Tensor], generators: Iterable[torch.Generator]) -> None:
        self.tensors = [*tensors]
        size = sum(t.numel() * t.element_size() for t in self.tensors)
        device = next((t.device for t in self.tensors), torch.device("cpu"))
        self.host = False
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self.host = size * SHARE_OF_MEMORY > free
        self.copies = [_clone(tensor, self.host) for tensor in self.tensors]
        self.generators = [(g, g.get_state()) for g in generators]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        for generator, state in self.generators:
            generator.set_state(state)


def default_generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[index]]


@dataclass(frozen=True)
class Outcome:
    """The loss of a step and what the step has made of the tensors."""

    loss: Tensor
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, loss: Tensor, tensors: dict[str, Tensor], host: bool) -> Outcome:
        copies = {name: _clone(tensor, host) for name, tensor in tensors.items()}
        return cls(loss.detach().double().cpu(), copies)


def _norm(values: Iterable[Tensor]) -> float:
    """The L2 norm of all values as one vector."""
    squares = [v.double().square().sum().cpu() for v in values if v.numel()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


@torch.no_grad()
def differences(
    before: dict[str, Tensor],
    eager: Outcome,
    again: Outcome,
    replayed: Outcome,
    dtype: torch.dtype,
) -> tuple[list[str], int]:
    """How a replay differs from the eager step, and in how many tensors its bits are the same.

    Args:
        before: the tensors before each of the steps.
        eager, again: two eager steps; their difference is that of kernels that are not deterministic.
    """
    faults = []
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    drift = abs(eager.loss - again.loss)
    if bool(drift > LOSS[dtype] * abs(eager.loss)):
        faults.append(
            f"two eager steps from the same state have the losses {float(eager.loss):.6g} and "
            f"{float(again.loss):.6g}: the step depends on more than tensors and generators"
        )
    allowed = LOSS[dtype] * abs(eager.loss) + DRIFT_FACTOR * drift
    same = torch.equal(eager.loss, replayed.loss) or bool(
        eager.loss.isnan().all() and replayed.loss.isnan().all()
    )
    if not same and not bool((eager.loss - replayed.loss).abs() <= allowed):
        faults.append(
            f"the loss is {float(replayed.loss):.6g}, that of the eager step {float(eager.loss):.6g}"
        )
    equal = sum(torch.equal(eager.tensors[n], replayed.tensors[n]) for n in before)
    change = _norm(eager.tensors[n] - before[n] for n in names)
    moved = _norm(replayed.tensors[n] - eager.tensors[n] for n in names)
    drifted = _norm(again.tensors[n] - eager.tensors[n] for n in names)
    if change == change and not moved <= MOVED[dtype] * change + DRIFT_FACTOR * drifted:
        faults.append(
            f"parameters and buffers moved otherwise: {moved:.3g} from where the eager step went, which "
            f"moved them by {change:.3g}"
        )
    for name, tensor in before.items():
        was, now = eager.tensors[name], replayed.tensors[name]
        if tensor.is_floating_point() and tensor.numel() < FEW:
            continue
        if torch.equal(now, tensor) and not torch.equal(was, tensor):
            faults.append(f"{name} did not change")
        elif torch.equal(was, tensor) and not torch.equal(now, tensor):
            faults.append(f"{name} changed, which the eager step leaves")
    return faults, equal
