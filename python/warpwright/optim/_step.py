"""The optimizers' common part: which tensors a kernel can take, and the state of the extras."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from .. import _C
from .._ops import ops
from ._shards import (
    PLAIN_TYPES,
    Cuts,
    cut_alike,
    cuts_of,
    is_dtensor,
    local,
    locals_of,
    norm_over_ranks,
    specs_of,
)

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
CAST_TYPES = {5: torch.float16, 15: torch.bfloat16}  # by the number of c10::ScalarType
MASTER = "master_param"
# A step asks them of several hundred tensors.
GRAD, DTYPE, LAYOUT, DEVICE = map(operator.attrgetter, ("grad", "dtype", "layout", "device"))


@dataclass
class Batch:
    """Parameters of one group that one call updates: one device, one dtype."""

    group: dict[str, Any]
    native: bool  # left to torch.optim's own functions
    first_step: bool
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)  # of each parameter
    copies: list[Tensor] = field(default_factory=list)  # in 16 bits, of each parameter or of none

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.has_shards = False  # some parameters are DTensors
        self.cuts: dict[Cuts, list[int]] = {}  # the parameters that are cut alike
        self.specs: list[Any] = []  # of parameters and gradients that fitted in the last step

    def add(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        self.device, self.dtype = param.device, param.dtype
        self.has_shards |= is_dtensor(param)
        self.cuts.setdefault(cuts_of(param), []).append(len(self.params))
        self.params.append(param)
        self.grads.append(grad)
        self.states.append(state)

    def operands(self, tensors: list[Tensor]) -> list[Tensor]:
        """As the ops take them: local shards, and complex numbers as pairs."""
        return as_real(locals_of(tensors) if self.has_shards else tensors)

    def values(self, name: str) -> list[Any]:
        return [state[name] for state in self.states]

    def refresh(self) -> bool:
        """Takes the gradients of this step; false if a kernel can't, or the parameters changed."""
        params: list[Tensor] = self.params
        grads: list[Any] = list(map(GRAD, params))
        self.grads = grads
        if self.native or self.first_step or type(None) in map(type, grads):
            return False
        if self.has_shards:
            specs = specs_of(params) + specs_of(grads)
            if not same_objects(specs, self.specs):
                pairs = [(p, g) for p, g in zip(params, grads, strict=True) if is_dtensor(p)]
                if not all(cut_alike(param, grad) for param, grad in pairs):
                    return False
                self.specs = specs
            params, grads = locals_of(params), locals_of(grads)
        return (
            set(map(type, grads)) <= PLAIN_TYPES
            and set(map(LAYOUT, grads)) == {torch.strided}
            and set(map(DTYPE, grads)) == {self.dtype}
            and set(map(DTYPE, params)) == {self.dtype}
            and set(map(DEVICE, params)) == {self.device}
        )


@dataclass
class Plan:
    """The batches of a group, reused while the group does not change. A step then only reads each
    parameter's gradient and state, and decides nothing."""

    group: dict[str, Any]
    params: list[Tensor]
    idle: list[Tensor]  # without a gradient
    flags: tuple[Any, ...]
    batches: list[Batch]

    def refresh(self, group: dict[str, Any], flags: tuple[Any, ...]) -> bool:
        return (
            self.group is group
            and self.flags == flags
            and same_objects(self.params, group["params"])
            and all(param.grad is None for param in self.idle)
            and all(batch.refresh() for batch in self.batches)
        )


def same_objects(a: Collection[Any], b: Collection[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def is_ours(param: Tensor, grad: Tensor) -> bool:
    """Dense tensors of the kernels' types; torch.optim's own functions take everything else."""
    if is_dtensor(param):
        if not cut_alike(param, grad):
            return False
        param, grad = local(param), local(grad)
    return (
        type(param) in PLAIN_TYPES
        and type(grad) in PLAIN_TYPES
        and param.dtype == grad.dtype
        and (param.dtype in FLOATING or (param.dtype in COMPLEX and not param.is_conj()))
        and param.layout == grad.layout == torch.strided
        and param.device == grad.device
        and param.device.type in ("cpu", "cuda")
    )


def as_real(tensors: list[Tensor]) -> list[Tensor]:
    """Complex tensors as pairs of reals: every update is elementwise in real and imaginary parts."""
    if not tensors or not tensors[0].is_complex():
        return tensors
    return [torch.view_as_real(t.resolve_conj()) for t in tensors]


def scalar_on(value: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """A hyperparameter for an op: a float, or a tensor on the GPU, so that the host does not wait."""
    if not isinstance(value, Tensor):
        return value, None
    if device.type == "cpu" or value.device.type == "cpu":
        return float(value), None
    value = value.to(device, non_blocking=True)
    return 0.0, value if value.dtype in (torch.float32, torch.float64) else value.float()


def _words(tensor: Tensor) -> str:
    name = "" if type(tensor) in PLAIN_TYPES else f"{type(tensor).__name__} of "
    return f"{name}{tensor.dtype}, {tensor.layout}, on {tensor.device}"


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.float32, non_blocking=True)


class FusedStep(Optimizer):
    """Mixin before a torch.optim class; the subclass has `_batches` and `_update`."""

    max_norm: float | None = None
    zero_grad_in_step: bool = False
    state_dtype: torch.dtype | None = None
    master_weights: bool = False
    weight_copies: bool = False
    grad_norm: Tensor | None = None
    _extras = ("max_norm", "zero_grad_in_step", "state_dtype", "master_weights", "weight_copies")
    _state_names: tuple[str, ...] = ()
    _planned_states: list[dict[str, Any]]

    def _set_extras(
        self,
        max_norm: float | None,
        zero_grad_in_step: bool,
        state_dtype: torch.dtype | None,
        master_weights: bool,
        weight_copies: bool,
    ) -> None:
        flags = {"zero_grad_in_step": zero_grad_in_step, "master_weights": master_weights}
        for name, value in (flags | {"weight_copies": weight_copies}).items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected a bool, got {value!r}")
        if max_norm is not None and not max_norm >= 0.0:
            raise ValueError(f"Invalid max_norm value: {max_norm} (expected at least 0)")
        if state_dtype not in (None, torch.float32):
            raise ValueError(f"state_dtype: expected None or torch.float32, got {state_dtype}")
        steps = zero_grad_in_step or state_dtype or master_weights or weight_copies
        wanted = max_norm is not None or steps
        if wanted and any(group["differentiable"] for group in self.param_groups):
            raise ValueError(
                "`differentiable` does not support max_norm, zero_grad_in_step, state_dtype, "
                "master_weights and weight_copies"
            )
        self.max_norm = max_norm
        self.zero_grad_in_step = zero_grad_in_step
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self.weight_copies = weight_copies
        if weight_copies:
            _C.record_weight_casts()
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if param.device.type == "cuda":
                self._counter(param.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._extras}}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler passes scale and found_inf to the step instead of waiting for the GPU."""
        return all(self._scales_in_step(group) for group in self.param_groups)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignores the constructors of torch.optim, which set it for fused=True."""

    def _scales_in_step(self, group: dict[str, Any]) -> bool:
        return not group["differentiable"]

    def _counter(self, device: torch.device) -> list[Tensor]:
        """A zero counter by which a launch finds its last block. Every launch resets it to zero."""
        if device.type != "cuda":
            return []
        counters = self.__dict__.setdefault("_counters", {})
        if device not in counters:
            zero = torch.zeros((), dtype=torch.int32, device=device)
            if torch.cuda.is_current_stream_capturing():
                # Only replays set it to zero, so it belongs to the graph.
                self.__dict__.setdefault("_captured_counters", []).append(zero)
                return [zero]
            counters[device] = zero
        return [counters[device]]

    # ---- float32 state of 16-bit parameters ----

    def _wants_fp32_state(self, param: Tensor) -> bool:
        return param.dtype in SIXTEEN_BIT and (
            self.master_weights or self.state_dtype is torch.float32
        )

    def _widen(self, param: Tensor, state: dict[str, Any]) -> None:
        if not self._wants_fp32_state(param):
            return
        for name in self._state_names:
            if isinstance(state.get(name), Tensor):
                state[name] = state[name].float()
        if self.master_weights and MASTER not in state:
            state[MASTER] = param.detach().float()

    def _masters(self, batch: Batch) -> list[Tensor]:
        if not self.master_weights or batch.dtype not in SIXTEEN_BIT:
            return []
        return batch.operands(batch.values(MASTER))

    # ---- 16-bit copies of float32 parameters ----

    def _copy_of(self, param: Tensor, grad: Tensor) -> Tensor | None:
        """The copy that the step writes next to `param`; None if no product has cast it."""
        if not self.weight_copies or param.dtype is not torch.float32 or is_dtensor(param):
            return None
        dtype = CAST_TYPES.get(_C.weight_cast_type(param._cdata))  # type: ignore[attr-defined]
        if dtype is None or not is_ours(param, grad):
            return None
        copies: dict[Tensor, Tensor] = self.__dict__.setdefault("_copies", {})
        copy = copies.get(param)
        same = copy is not None and (copy.dtype, copy.device) == (dtype, param.device)
        if copy is None or not same or copy.stride() != param.stride():
            copy = copies[param] = torch.empty_like(param, dtype=dtype, requires_grad=False)
        return copy

    def _copied(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, its copy) of every parameter that has one."""
        return list(self.__dict__.get("_copies", {}).items())

    @_disable_dynamo  # torch.compiler.disable, but imports torch._dynamo at the first call
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not (self.master_weights or self.state_dtype):
            return
        # torch.optim casts all state to the parameters' dtypes; here the float32 values are restored.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, own, strict=True):
            if not self._wants_fp32_state(param):
                continue
            for name in (*self._state_names, MASTER):
                value = state_dict["state"].get(key, {}).get(name)
                if isinstance(value, Tensor):
                    self.state[param][name] = value.to(param.device, torch.float32, copy=True)

    # ---- the step ----

    def _gather(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters with a gradient, and the gradients; makes the state that torch.optim makes."""
        raise NotImplementedError

    def _has_state(self, group: dict[str, Any]) -> bool:
        return True

    def _flags(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """The options of a group that decide how its parameters are batched."""
        raise NotImplementedError

    def _key(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[bool, Any]:
        """(whether it is the first step, other properties that the parameters of one call share)."""
        raise NotImplementedError

    def _state_fits(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether a DTensor's state has the same shards as the parameter."""
        tensors = (state.get(name) for name in (*self._state_names, MASTER))
        return not is_dtensor(param) or all(
            cut_alike(param, tensor) for tensor in tensors if isinstance(tensor, Tensor)
        )

    def _plan(self, group: dict[str, Any]) -> Plan:
        params, grads = self._gather(group)
        has_state = self._has_state(group)
        batches: dict[Any, Batch] = {}
        for param, grad in zip(params, grads, strict=True):
            has_master = self.master_weights and param.dtype in SIXTEEN_BIT
            state = self.state[param] if has_state or has_master else {}
            native = (
                group["differentiable"]
                or not is_ours(param, grad)
                or not self._state_fits(param, state)
            )
            if native:
                first_step, alike = False, grad.is_sparse
            else:
                first_step, alike = self._key(group, state)
                self._widen(param, state)
            copy = None if native else self._copy_of(param, grad)
            copy_type = None if copy is None else copy.dtype
            key = (native, first_step, alike, param.device, param.dtype, copy_type)
            if key not in batches:
                batches[key] = Batch(group, native, first_step)
            batches[key].add(param, grad, state)
            if copy is not None:
                batches[key].copies.append(copy)
        idle = [param for param in group["params"] if param.grad is None]
        flags = self._all_flags(group)
        return Plan(group, list(group["params"]), idle, flags, list(batches.values()))

    def _all_flags(self, group: dict[str, Any]) -> tuple[Any, ...]:
        flags = self._flags(group)
        return (*flags, _C.count_weight_casts()) if self.weight_copies else flags

    def _batches(self) -> list[Batch]:
        plans: list[Plan] = self.__dict__.get("_plans", [])
        # Compares the dictionaries' identities: loading or resetting state makes new ones.
        same = (
            len(plans) == len(self.param_groups)
            and same_objects(self.state.values(), self._planned_states)
            and all(
                plan.refresh(group, self._all_flags(group))
                for plan, group in zip(plans, self.param_groups, strict=True)
            )
        )
        if not same:
            plans = self._plans = [self._plan(group) for group in self.param_groups]
            self._planned_states = list(self.state.values())
        return [batch for plan in plans for batch in plan.batches]

    def _update(
        self,
        batch: Batch,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip: Tensor | None,
    ) -> None:
        raise NotImplementedError

    def _update_native(self, batch: Batch) -> None:
        raise NotImplementedError

    def _check_capture(self) -> None:
        """torch.optim.Adam refuses a capture that would freeze its step count."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; `closure` reevaluates the model and returns the loss."""
        # A compiled region gets one graph break and runs the kernels as in eager mode.
        if torch.compiler.is_compiling():
            return self._step_untraced(closure)
        return self._step(closure)

    @_disable_dynamo  # torch.compiler.disable, but imports torch._dynamo at the first call
    def _step_untraced(self, closure: Callable[[], Any] | None) -> Any:
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            self._run(self._batches())
        return loss

    def _run(self, batches: list[Batch]) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        clip = self._clip(batches, grad_scale) if self.max_norm is not None else None
        for batch in batches:
            if batch.native:
                self._run_native(batch, grad_scale, found_inf)
            else:
                device = batch.device
                self._update(batch, _on(grad_scale, device), _on(found_inf, device), clip)
                if batch.has_shards:  # the ops wrote the shards only
                    torch.autograd.graph.increment_version(batch.params)

    def _run_native(
        self, batch: Batch, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        # torch.optim's functions take neither the scale nor found_inf: this waits for the GPU.
        skip = found_inf is not None and bool(found_inf)
        if grad_scale is not None and not skip:
            for grad in batch.grads:
                grad.div_(grad_scale.to(grad.device))
        if not skip:
            self._update_native(batch)
        if self.zero_grad_in_step:
            for grad in batch.grads:
                grad.zero_()

    def _clip(self, batches: list[Batch], grad_scale: Tensor | None) -> Tensor | None:
        if not batches:
            return None
        native = [batch for batch in batches if batch.native]
        if native:
            param, grad = native[0].params[0], native[0].grads[0]
            raise NotImplementedError(
                "max_norm: expected dense gradients of the parameters' type on the CPU or a GPU, "
                f"got {_words(grad)}, for a parameter of {_words(param)}"
            )
        devices = {batch.device for batch in batches}
        if len(devices) > 1:
            raise NotImplementedError(
                f"max_norm: expected all parameters on one device, got {sorted(map(str, devices))}"
            )
        (device,) = devices
        assert self.max_norm is not None
        counter, scale = self._counter(device), _on(grad_scale, device)
        alike: dict[Cuts, list[Tensor]] = {}
        for batch in batches:
            operands = batch.operands(batch.grads)
            for cuts, places in batch.cuts.items():
                alike.setdefault(cuts, []).extend(operands[i] for i in places)
        if alike.keys() == {()}:
            norm = ops.grad_norm(alike[()], counter, float(self.max_norm), scale)
        else:
            norms = [(c, ops.grad_norm(g, counter, 0.0, scale)[0]) for c, g in alike.items()]
            total = norm_over_ranks(norms).reshape(1)
            norm = ops.grad_norm([total], counter, float(self.max_norm), None)
        self.grad_norm = norm[0]
        return norm
