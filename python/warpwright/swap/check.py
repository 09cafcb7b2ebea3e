"""The ``check=`` of :func:`warpwright.swap`: is the swapped model as accurate as the native one?

It makes two comparisons:

- Each swapped module, on its inputs inside the model and with a random cotangent: output, gradients
  and updated buffers by the error rule. Errors do not accumulate over layers, so the bound is strict,
  and a failure names the layer. A fused module is compared with the native chain. Its gradients may
  jump (see below), so they have the whole model's bound.
- The whole model, forward and backward. Rounding may flip a ReLU or the choice of a max pool, and
  gradients then jump. So the bound is loose. This comparison finds faults between modules: aliasing,
  hooks, modes.

``judge`` has the bounds.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from .._precision import KeepsDouble, Tf32Products, split_products, tf32_products
from ..integrations import Change
from ..integrations._logits import tensor_of
from ..testing import to_double
from .blocks import base_of
from .classes import set_class
from .forms import binder
from .fuse import Graphs
from .inputs import as_call, loss_of, native_must_take
from .judge import Call, Run, compare_runs, judge, mean_terms
from .patterns import CHAINS
from .trace import REST

Loss = Callable[[Any], Tensor]


def compare_model(
    model: nn.Module,
    chosen: dict[nn.Module, type[nn.Module]],
    inputs: Any,
    loss_fn: Loss | None,
    graphs: Graphs | None = None,
    changes: Sequence[Change] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The numbers, and a line per failure. Leaves ``model`` native and unchanged.

    Args:
        graphs: the new forwards of the modules whose layers are fused.
        changes: changes other than of a class; the whole model's comparison covers them.
    """
    names = {module: name for name, module in model.named_modules()}
    natives = {module: type(module) for module in chosen}
    call = as_call(inputs)
    loss_fn = loss_fn or mean_square
    with torch.enable_grad(), _without_attention_dropout(chosen):
        calls, dtypes = _record(model, list(chosen), call, loss_fn)
        fused = _record_fused(model, chosen, graphs or {}, calls)
        calls = {m: c for m, c in calls.items() if base_of(chosen[m]) is None}
        failures: list[str] = []
        rows: list[dict[str, Any]] = []
        for module, module_call in {**calls, **fused}.items():
            native_class = CHAINS[chosen[module]] if module in fused else type(module)
            found, lines = compare_module(module, native_class, chosen[module], module_call)
            name = (chosen if module in fused else natives)[module].__name__
            rows.append({"module": names[module], "type": name, **found})
            failures += [f"{names[module] or '(the model)'} ({name}): {line}" for line in lines]
        with native_must_take(model, call):
            native = _run(model, call, loss_fn)
        exact = _run_double(model, call, loss_fn)
        try:
            for module, mine in chosen.items():
                set_class(module, mine)
            for change in changes:
                change.apply()
            mine_run = _run(model, call, loss_fn)
        finally:
            for change in changes:
                change.undo()
            for module, kind in natives.items():
                set_class(module, kind)
    whole, lines = compare_runs(mine_run, native, exact, dtypes)
    failures += lines
    layers = [module for module, kind in chosen.items() if base_of(kind) is None]
    unreached = [names[module] for module in layers if module not in calls]
    summary = (
        f"check: {len(calls)} modules and the whole model agree with native"
        if not failures
        else f"check: {len(failures)} differences"
    )
    if unreached:
        summary += f"; not reached by these inputs: {', '.join(unreached)}"
    result = {"summary": summary, "modules": rows, "model": whole, "unreached": unreached}
    return result, failures


def mean_square(output: Any) -> Tensor:
    """The default loss: the sum over all floating outputs of their mean squares."""
    leaves = [t for t in _tensors(output) if t.is_floating_point()]
    if not leaves:
        raise TypeError(
            "check: the model returns no floating tensor; pass loss_fn to turn its output into one"
        )
    # Sums in at least float32, so that a half precision output cannot overflow.
    return sum((t if t.dtype == torch.float64 else t.float()).pow(2).mean() for t in leaves)  # type: ignore[return-value]


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, logits that are not computed yet included."""
    leaves = (tensor_of(leaf) for leaf in tree_leaves(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _copied(value: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(convert, value)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers and the random state after the block."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for table, entries in tables:
                table.update(entries)
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)


@contextlib.contextmanager
def _without_attention_dropout(chosen: Iterable[nn.Module]) -> Iterator[None]:
    """Sets dropout to 0: attentions with different random numbers cannot be compared."""
    found = [m for m in chosen if isinstance(m, nn.MultiheadAttention)]
    rates = [m.dropout for m in found]
    for module in found:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module, rate in zip(found, rates, strict=True):
            module.dropout = rate


def _run(model: nn.Module, call: Call, loss_fn: Loss) -> Run:
    """Forward and backward without touching ``.grad``."""
    with _unchanged(model):
        args, kwargs = _copied(call)
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for i, leaf in enumerate(tree_leaves((args, kwargs))):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[f"input {i}"] = leaf  # type: ignore[assignment]
        grads: tuple[Tensor | None, ...] = ()
        if loss.requires_grad and leaves:
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        outputs = _tensors(output)
        return {
            "loss": {"loss": loss.detach()},
            "output": {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)},
            "gradients": dict(zip(leaves, grads, strict=False)),
            "buffers": {n: b.detach().clone() for n, b in model.named_buffers()},
        }


def _run_double(model: nn.Module, call: Call, loss_fn: Loss) -> Run | None:
    """The native model in float64; None if the model cannot be copied or run in float64."""
    try:
        with KeepsDouble():
            return _run(copy.deepcopy(model).double(), to_double(call), loss_fn)
    except Exception:  # a foreign model may raise anything in float64; native is then the oracle
        return None


def _record(
    model: nn.Module, modules: list[nn.Module], call: Call, loss_fn: Loss
) -> tuple[dict[nn.Module, Call], set[torch.dtype]]:
    """The arguments of each module's first call inside the model, and the dtypes of all outputs."""
    calls: dict[nn.Module, Call] = {}
    dtypes: set[torch.dtype] = set()

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        # Copies: an in-place ReLU after this module would change its saved inputs.
        if module not in calls:
            calls[module] = _copied((args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        dtypes.update(
            t.dtype for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()
        )

    hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in modules]
    hooks += [m.register_forward_hook(after) for m in modules]
    try:
        with _unchanged(model):
            args, kwargs = _copied(call)
            with native_must_take(model, call):
                output = model(*args, **kwargs)
            loss_of(loss_fn, output)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, dtypes


class _FusedCalls(fx.Interpreter):
    """Runs a fused graph on native chains and keeps the inputs of each chain."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)  # type: ignore[arg-type]
        self.calls: dict[nn.Module, Call] = {}

    def call_module(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "fused" in kwargs:
            self.calls.setdefault(self.fetch_attr(target), _copied((args, kwargs)))
        if REST in kwargs:
            kwargs = {**kwargs, **kwargs[REST]}
            del kwargs[REST]
        return super().call_module(target, args, kwargs)


def _record_fused(
    model: nn.Module,
    chosen: dict[nn.Module, type[nn.Module]],
    blocks: Graphs,
    calls: dict[nn.Module, Call],
) -> dict[nn.Module, Call]:
    """The inputs of each fused module, from the recorded call of its block."""
    found: dict[nn.Module, Call] = {}
    keepers = [(module, CHAINS[kind]) for module, kind in chosen.items() if kind in CHAINS]
    natives = [(module, type(module)) for module, _ in keepers]
    try:
        for module, chain in keepers:
            set_class(module, chain)
        for block, graphs in blocks.items():
            if block not in calls:
                continue
            args, kwargs = calls[block]
            values, rest = binder(type(block))[0](block, *args, **kwargs)
            graph = next((graph for recipe, graph in graphs if recipe.takes(values, rest)), None)
            if graph is None:
                continue  # the new forward does not take this call
            with _unchanged(model):
                run = _FusedCalls(block, graph)
                run.run(*_copied((*values, rest)))
            found.update(run.calls)
    finally:
        for module, kind in natives:
            set_class(module, kind)
    return found


def bare(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """``module`` as ``kind``, sharing its tensors, without its hooks."""
    found = kind.__new__(kind)
    found.__dict__ = dict(module.__dict__)
    for key, value in module.__dict__.items():
        if key.endswith("_hooks") and isinstance(value, OrderedDict):
            found.__dict__[key] = OrderedDict()
        elif key in ("_parameters", "_buffers"):
            found.__dict__[key] = dict(value)
    return found


def compare_module(
    module: nn.Module, theirs: type[nn.Module], mine: type[nn.Module], call: Call
) -> tuple[dict[str, Any], list[str]]:
    """The largest errors of ``module`` as ``mine`` and as ``theirs``, and a line per failure."""
    # Old-style weight_norm and pruning set the weight as a plain attribute with a history.
    plain = {k: v.detach() for k, v in vars(module).items() if isinstance(v, Tensor)}
    tensors = {
        **{n: p.detach().requires_grad_(p.requires_grad) for n, p in module.named_parameters()},
        **{n: b.detach() for n, b in module.named_buffers()},
    }

    devices = {t.device for t in tree_leaves((tensors, call)) if isinstance(t, Tensor)}
    device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
    products, split = tf32_products(device), split_products(device)

    def run(kind: type[nn.Module], double: bool, cotangents: list[Tensor] | None) -> Any:
        state, (args, kwargs), extra = _copied((tensors, call, plain))
        if double:
            state, args, kwargs, extra = to_double((state, args, kwargs, extra))
        leaves = [
            t
            for t in tree_leaves((args, kwargs, state))
            if isinstance(t, Tensor) and t.requires_grad
        ]
        # Not the leaves themselves: the module may work in place.
        inputs = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (args, kwargs))
        layer = bare(module, kind)
        layer.__dict__.update(extra)
        with KeepsDouble() if double else contextlib.nullcontext():
            output = torch.func.functional_call(layer, state, *inputs)
        outputs = _tensors(output)
        roots = [t for t in outputs if t.requires_grad]
        if cotangents is None:
            generator = torch.Generator().manual_seed(0)
            cotangents = [torch.randn(t.shape, generator=generator).to(t.device) for t in roots]
        grads: tuple[Tensor | None, ...] = ()
        if roots:
            ready = [c.to(t.dtype) for c, t in zip(cotangents, roots, strict=True)]
            grads = torch.autograd.grad(roots, leaves, ready, allow_unused=True)
        results = {f"output {i}" if i else "output": t.detach() for i, t in enumerate(outputs)}
        names = [n for n, t in state.items() if t.requires_grad]
        names = [f"input {i}" for i in range(len(leaves) - len(names))] + names
        results |= {
            f"gradient of {n}": g for n, g in zip(names, grads, strict=False) if g is not None
        }
        results |= {n: state[n] for n in dict(module.named_buffers())}
        return results, cotangents

    native, cotangents = run(theirs, False, None)
    exact, _ = run(theirs, True, cotangents)
    ours, _ = run(mine, False, cotangents)
    rounded = exact
    if (products or split) and isinstance(module, (nn.Conv2d, nn.Linear, nn.MultiheadAttention)):
        with Tf32Products(products, split):
            rounded, _ = run(theirs, True, cotangents)
    terms = mean_terms(module, call)
    lines = []
    worst = {"error": 0.0, "native_error": 0.0}
    if ours.keys() != native.keys():
        return worst, [f"results: {sorted(ours)}, native {sorted(native)}"]
    for key in native:
        line, error, native_error = judge(
            ours[key],
            native[key],
            exact[key],
            allowed=rounded[key] if native[key].dtype == torch.float32 else exact[key],
            terms=terms if key == "running_mean" else None,
            jumps=mine in CHAINS and key.startswith("gradient"),
        )
        if error >= worst["error"]:
            worst = {"error": error, "native_error": native_error}
        if line:
            lines.append(f"{key}: {line}")
    return worst, lines
