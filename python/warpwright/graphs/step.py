"""A training step behind one call: captured in CUDA graphs and replayed, or run eagerly on a CPU.

Graphs belong to the shapes of a batch and to the options that they hold as numbers. Before they are
used, one replay is compared with eager steps from the same state, and all of it is undone. Then a call
copies the batch into the graph's inputs, brings the learning rates up to date, and replays.
"""

from __future__ import annotations

import functools
import numbers
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .._user_errors import kind_of, require_function
from ..optim._shards import local
from .body import Body, Loss, Phase
from .capture import Rates, move_step_counts, record, why_not_scaled
from .copies import WeightCopies, read_in_capture
from .prefetch import prefetched
from .replicas import Replicas
from .state import (
    Outcome,
    Snapshot,
    default_generators,
    differences,
    numbers_of,
    tensors_of,
)
from .watch import CaptureError, Watch


@dataclass
class Captured:
    """One graph, its inputs and its results."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any
    grads: list[Tensor | None]
    grad_norm: Tensor | None
    optimizer_norm: Tensor | None  # that of warpwright.optim, with max_norm


Graphs = dict[Phase, Captured]


class GraphStep:
    """A training step that replays CUDA graphs, made by :func:`graph_step`.

    Attributes:
        why_eager: why no graph is used; "" if graphs are.
        obstacles: what would stop a capture, found in the first step on a CPU.
        checked: what the check of each capture has said.
        grad_norm: with ``clip_grad_norm``, the last step's norm before clipping.
    """

    def __init__(self, body: Body, *, max_shapes: int, check: bool, pool: Any = None) -> None:
        self._body = body
        self._max_shapes, self._check_first = max_shapes, check
        self.grad_norm: Tensor | None = None
        self.obstacles: list[str] = []
        self.checked: list[str] = []
        self.why_eager = ""
        self._batches = 0  # since the optimizer's last step
        self._watched = False
        self._graphs: OrderedDict[Any, Graphs] = OrderedDict()
        if body.device.type != "cuda":
            self.why_eager = f"the parameters are on the {body.device.type.upper()}"
            return
        why = why_not_scaled(body.optimizer) if body.scaler is not None else ""
        if why:
            raise CaptureError(why)
        self._replicas = Replicas(body.model)
        self._stream = _stream_of(body.device)
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        self._rates = Rates(body.optimizer, body.device)
        self._frozen = self._rates.frozen()
        self._copies = WeightCopies(body.optimizer)
        # The optimizer's state that the graphs read and write.
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._places: list[int] = []
        self._current: Captured | None = None

    # ---- what a user calls ----

    def __call__(self, inputs: Any, *targets: Any) -> Any:
        """One step on a batch of the example's form.

        Returns:
            The loss, detached; or all that ``loss`` returned.
        """
        batch = _plain(inputs), *targets
        phase = self._body.phases[self._batches]
        result = self._eagerly(batch, phase) if self.why_eager else self._replay(batch, phase)
        self._batches = (self._batches + 1) % self._body.accumulate
        return result

    def prepare(self, inputs: Any, *targets: Any) -> None:
        """Captures the step for batches of this form; does not train on it."""
        if not self.why_eager:
            self._graphs_of(*tree_flatten((_plain(inputs), *targets)))

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of ``loader`` on the step's device.

        Each is copied on a stream of its own while the step before it runs, if it is in pinned
        memory.
        """
        return prefetched(loader, self._body.device)

    def reset(self) -> None:
        """Drops all graphs. The next call captures again, with the model as it is then."""
        self._graphs.clear()
        self.checked.clear()
        if not self.why_eager:
            self._current = None
            self._states = {}
            self._body.sums = None

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph."""
        return bool(self._graphs)

    def __repr__(self) -> str:
        if self.why_eager:
            lines = [f"graph_step: eager, because {self.why_eager}"]
            return "\n  no graph could hold: ".join([*lines, *self.obstacles])
        lines = [f"graph_step: {len(self._graphs)} of at most {self._max_shapes} forms captured"]
        return "\n  ".join([*lines, *self.checked])

    # ---- the eager step ----

    def _eagerly(self, batch: tuple[Any, ...], phase: Phase) -> Any:
        batch = self._on_device(batch)
        if self._watched:
            result = self._body(batch, phase)
        else:
            with Watch(self._body.device, raises=False) as watch:
                result = self._body(batch, phase)
            self.obstacles, self._watched = watch.found, True
        self.grad_norm = self._body.grad_norm
        return result

    def _on_device(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        device = self._body.device
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)

    # ---- the replay ----

    def _replay(self, batch: tuple[Any, ...], phase: Phase) -> Any:
        leaves, spec = tree_flatten(batch)
        graphs = self._graphs_of(leaves, spec)
        if not self._is_bound() and not self._bind():
            return self._first_step(batch, phase)
        made = graphs[phase]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        for static, given in zip(made.inputs, tensors, strict=True):
            static.copy_(given, non_blocking=True)
        self._rates.load()
        if self._current is not made:
            for param, grad in zip(self._body.params, made.grads, strict=True):
                param.grad = grad
            self._current = made
        self._copies.refresh()
        made.graph.replay()
        self.grad_norm = made.grad_norm
        optimizer: Any = self._body.optimizer
        if made.optimizer_norm is not None:
            optimizer.grad_norm = made.optimizer_norm
        optimizer._opt_called = True  # schedulers ask for it
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, made.result)

    def _first_step(self, batch: tuple[Any, ...], phase: Phase) -> Any:
        """The optimizer's first step may compute something else than the later ones: it runs eagerly.

        Unwatched: under a dispatch mode our ops take other paths, and round more often.
        """
        with self._rates.placed():
            result = self._body(self._on_device(batch), phase)
        self.grad_norm = self._body.grad_norm
        if phase.last:
            self._bind()
        return result

    def _is_bound(self) -> bool:
        """Whether the optimizer has the state that the graphs use."""
        state = self._body.optimizer.state
        return all(state.get(p) is mine for p, mine in [*self._states.items()][:1])

    def _bind(self) -> bool:
        """Takes over other values of the optimizer's state; false if it has none yet."""
        state = self._body.optimizer.state
        if not state:
            return False
        for param, mine in self._states.items():
            theirs = state.get(param, {})
            if theirs.keys() != mine.keys():
                raise CaptureError(
                    f"optimizer: expected a state of {sorted(mine)} for every parameter of the capture, got "
                    f"{sorted(theirs)}: call reset() after such a change"
                )
            for name, value in theirs.items():
                if isinstance(value, Tensor) and isinstance(mine[name], Tensor):
                    mine[name].copy_(value)
                else:
                    mine[name] = value
            state[param] = mine
        return True

    # ---- the graphs ----

    def _graphs_of(self, leaves: list[Any], spec: Any) -> Graphs:
        self._look_for_changes()
        parts = [(x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in leaves]
        key = (spec, self._body.model.training, self._frozen, *parts)
        found = self._graphs.get(key)
        if found is None:
            if len(self._graphs) >= self._max_shapes:
                self._graphs.popitem(last=False)
            found = self._graphs[key] = self._capture(leaves, spec)
        elif len(self._graphs) > 1:
            self._graphs.move_to_end(key)
        return found

    def _look_for_changes(self) -> None:
        """Drops the graphs if the parameters lie elsewhere; makes others for other options."""
        places = [local(p).data_ptr() if p.requires_grad else 0 for p in self._body.params]
        if places != self._places:
            self.reset()
            self._places = places
        frozen = self._rates.frozen()
        if frozen == self._frozen:
            return
        if self._graphs:
            names = {new[0] for old, new in zip(self._frozen, frozen, strict=False) if old != new}
            warnings.warn(
                f"warpwright.graph_step: {', '.join(sorted(names)) or 'the groups'} of the optimizer changed. "
                "A graph holds it as a number, so the step is captured again. Only learning rates change "
                "without that",
                stacklevel=5,
            )
        self._frozen = frozen

    def _capture(self, leaves: list[Any], spec: Any) -> Graphs:
        """Warms up, captures and checks, then undoes all of it."""
        body, optimizer = self._body, self._body.optimizer
        inputs = [_static(x, body.device) for x in leaves if isinstance(x, Tensor)]
        rest = iter(inputs)
        batch = tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], spec)
        fresh = not optimizer.state
        optimizer.state.update(self._states if fresh else {})
        grads = [p.grad for p in body.params]
        move_step_counts(optimizer)
        generators = [*default_generators(body.device), *body.generators()]
        tensors, scaling = body.tensors(), body.scaling()
        start = Snapshot([*tensors.values(), *tensors_of(optimizer.state), *scaling], generators)
        current = torch.cuda.current_stream(body.device)
        self._stream.wait_stream(current)
        try:
            with (
                self._rates.placed(),
                self._replicas.ready(),
                torch.cuda.stream(self._stream),
            ):
                own = [*body.generators(), *self._warm_up(batch)]
                numbers = numbers_of(optimizer)
                graphs = self._record(batch, inputs, own)
                if numbers_of(optimizer) != numbers:
                    raise CaptureError(
                        f"optimizer: {type(optimizer).__name__} counts on the host, and a replay does not "
                        "count there; expected an optimizer with capturable=True"
                    )
                start.restore()
                if self._check_first:
                    self._check(graphs, batch, tensors, [*generators, *own])
        finally:
            current.wait_stream(self._stream)
            start.restore()
            self._states = {**optimizer.state}
            if fresh:
                optimizer.state.clear()
            for param, grad in zip(body.params, grads, strict=True):
                param.grad = grad
            self._current = None
        return graphs

    def _warm_up(self, batch: tuple[Any, ...]) -> list[torch.Generator]:
        """Eager steps. Returns the generators that ops were given."""
        body = self._body
        body.whole(batch)  # compiles, outside of the watch
        if body.accumulate > 1 and body.sums is None:
            body.sums = [p.grad for p in body.params]
        with Watch(body.device, raises=False) as watch:
            body.whole(batch)
        for _ in range(self._replicas.warm_up - 2):
            body.whole(batch)
        return [g for g in watch.generators if g.device.type == "cuda"]

    def _record(
        self, batch: tuple[Any, ...], inputs: list[Tensor], own: list[torch.Generator]
    ) -> Graphs:
        body, graphs = self._body, {}
        for phase in dict.fromkeys(body.phases):
            with read_in_capture():
                graph, result = record(
                    functools.partial(body, batch, phase),
                    stream=self._stream,
                    pool=self._pool,
                    generators=own,
                    watch=Watch(body.device, raises=True),
                    why_legacy_stream=self._replicas.why_legacy_stream,
                )
            grads = [p.grad for p in body.params]
            norm = body.grad_norm if phase.last else None
            own_norm = getattr(body.optimizer, "grad_norm", None) if phase.last else None
            graphs[phase] = Captured(graph, inputs, result, grads, norm, own_norm)
        return graphs

    def _check(
        self,
        graphs: Graphs,
        batch: tuple[Any, ...],
        tensors: dict[str, Tensor],
        generators: list[torch.Generator],
    ) -> None:
        """Compares replays with eager steps from the same state.

        Raises:
            CaptureError: they differ.
        """
        body = self._body
        state = [*tensors_of(body.optimizer.state), *body.scaling()]
        before = Snapshot([*tensors.values(), *state], generators)

        def outcome(run: Callable[[], Any]) -> Outcome:
            before.restore()
            result = run()
            loss = result[0] if isinstance(result, (tuple, list)) else result
            return Outcome.of(loss, tensors, before.host)

        def replay() -> Any:
            self._copies.refresh()
            for phase in body.phases:
                graphs[phase].graph.replay()
            return graphs[body.phases[-1]].result

        eager = outcome(lambda: body.whole(batch))
        again = outcome(lambda: body.whole(batch))
        replayed = outcome(replay)
        dtype = body.autocast or body.params[0].dtype
        start = dict(zip(tensors, before.copies, strict=False))
        faults, equal = differences(start, eager, again, replayed, dtype)
        if faults:
            raise CaptureError(
                "the replay can't stand for the eager step, so the capture was undone: "
                + "; ".join(faults[:5])
            )
        shapes = ", ".join(str(tuple(x.shape)) for x in graphs[body.phases[0]].inputs)
        self.checked.append(
            f"inputs of {shapes}: loss {float(replayed.loss):.6g}, as the eager step; "
            f"{equal} of {len(tensors)} parameters and buffers have its bits"
        )


def graph_step(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Any,
    *,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    max_shapes: int = 4,
    check: bool = True,
    pool: Any = None,
) -> GraphStep:
    """Captures a whole training step in a CUDA graph: forward, loss, backward and optimizer.

    The returned step takes a batch, copies it into the graph's inputs and replays the graph. Before a
    graph is used, a replay on the example is compared with eager steps from the same state. Capture and
    check leave parameters, buffers, optimizer and random states as they were. A batch of another shape,
    dtype or stride gets a graph of its own at its first call.

    Without CUDA the same step runs eagerly, with a warning.

    Args:
        model: the model, swapped and compiled or not.
        loss: called with the model's output and the targets of the batch. Returns the loss, or a tuple
            that begins with it.
        optimizer: of ``torch.optim`` or ``warpwright.optim``. Schedulers work as before, outside of
            the step: the graph reads the learning rates from memory. Other options that change cause
            a new capture.
        example: a batch ``(inputs, *targets)``. ``inputs`` is a tensor, a tuple of arguments or a
            dict of keyword arguments.
        autocast: the dtype of autocast around forward and loss; None means no autocast.
        scaler: a ``torch.amp.GradScaler``. The optimizer must skip its step on the GPU, as those with
            ``fused=True`` do.
        clip_grad_norm: the greatest 2-norm of all gradients; None means no clipping.
        accumulate: calls whose gradients add up to one step of the optimizer; the loss of each counts
            1 / ``accumulate``.
        max_shapes: forms of batches with a graph; the one unused for longest is dropped.
        check: whether to compare before a graph is used.
        pool: the memory pool of graphs that never run at the same time as these.
    Returns:
        The step: ``loss = step(inputs, *targets)``.
    Raises:
        CaptureError: names what a graph cannot hold, or how the replay differs. Nothing has changed
            then.
        TypeError, ValueError: an argument is not of the kind above.
    Warns:
        UserWarning: the parameters are on a CPU.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    for name, value in (("accumulate", accumulate), ("max_shapes", max_shapes)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"autocast: expected a torch.dtype or None, got {autocast!r}")
    if clip_grad_norm is not None and not (
        isinstance(clip_grad_norm, numbers.Real) and clip_grad_norm > 0
    ):
        raise ValueError(f"clip_grad_norm: expected a positive number, got {clip_grad_norm!r}")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler: expected a torch.amp.GradScaler or None, got {kind_of(scaler)}")
    batch = example if isinstance(example, (tuple, list)) else (example,)
    if not batch:
        raise ValueError("example: expected a batch (inputs, *targets), got an empty one")
    if not isinstance(batch[0], (Tensor, tuple, list, Mapping)):
        raise TypeError(
            "example: expected a batch (inputs, *targets) whose inputs are a tensor, a tuple of arguments "
            f"or a dict of keyword arguments, got {kind_of(batch[0])}"
        )
    targets = batch[1:]
    words = f"(output, *targets), of which example has {len(targets)}"
    require_function("loss", loss, "output", *targets, words=words)
    body = Body(model, loss, optimizer, autocast, scaler, clip_grad_norm, accumulate)
    step = GraphStep(body, max_shapes=max_shapes, check=check, pool=pool)
    if step.why_eager:
        warnings.warn(
            f"warpwright.graph_step: every step runs eagerly, because {step.why_eager}",
            stacklevel=2,
        )
    step.prepare(*batch)
    return step


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """The stream of all captures: graphs that share a pool must come from one stream."""
    return torch.cuda.Stream(device)


def _plain(inputs: Any) -> Any:
    """Keyword arguments as a dict, whatever mapping a tokenizer returns."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _static(tensor: Tensor, device: torch.device) -> Tensor:
    """A graph's own copy of an input, with its strides."""
    return tensor.detach().to(device, copy=True)
