"""Rotary embeddings of transformers' attention layers: one launch for query and key.

The attention layers call the function ``apply_rotary_pos_emb`` of their model's file. A swapped
layer gets a class whose forward is a copy of its own, with another function of this name. So the
file, other models and other layers keep the native one.

The native function is known by its code, and compared with ours once. A call that ours does not
take runs the native function.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional as F
from ..._arch import FLOATING, PLAIN, why_no_kernel
from ...swap.blocks import COPY_OF, generated_class, why_no_block
from ...swap.classes import set_class, type_name
from ...swap.report import IS_OURS, REPLACED, SwapEntry
from ...swap.selection import WhyLeft
from ...swap.sources import function_fingerprint
from ...swap.trace import undecorated
from .. import Plan
from ._sources import class_of
from ._views import NAME, NATIVE

OP = "rotary_embedding"
FUNCTION = "apply_rotary_pos_emb"
UNKNOWN = f"its {FUNCTION} has other code than those that warpwright knows"

# By fingerprint, in transformers 4.57 and 5.23: whether the table may have fewer columns than a head.
KNOWN = {
    "3b47cc7cc25f5e31": False,  # Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3 and others, 4.57
    "7e6ade464dd9704f": False,  # the same, 5.23
    "d3fc538c921752ca": True,  # GPT-NeoX and others, 4.57
    "ce2f98fbfcfc944c": True,  # the same, 5.23
    "6ef913cd47fcc646": True,  # Phi-3, 4.57
    "74246db7a47e0978": True,  # the same, 5.23
}

Rotate = Callable[..., tuple[Tensor, Tensor]]


# ---- the function ----


def _takes(q: Any, k: Any, cos: Any, sin: Any, partial: bool) -> bool:
    """Whether our function computes what the native one does, but for dtypes."""
    if not all(type(x) in PLAIN for x in (q, k, cos, sin)) or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, tokens, width = q.shape
    rotated = cos.shape[2]
    return bool(
        (k.shape[0], k.shape[2], k.shape[3]) == (batch, tokens, width)
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == tokens
        and (rotated == width or (partial and rotated < width))
        and rotated % 2 == 0
        and k.dtype == q.dtype
        and cos.dtype == sin.dtype
        and q.device == k.device == cos.device == sin.device
        and _has_kernel(q)
    )


def _has_kernel(x: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return x.dtype in FLOATING and x.device.type in ("cpu", "cuda")
    return why_no_kernel(x) is None


def _function(native: Rotate, partial: bool, rounds: bool) -> Rotate:
    """Ours for ``native``. ``rounds``: what is called next casts to autocast's dtype."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not args and not kwargs and _takes(q, k, cos, sin, partial):
            kind = q.device.type
            if cos.dtype == q.dtype or (
                rounds
                and cos.dtype == torch.float32
                and torch.is_autocast_enabled(kind)
                and torch.get_autocast_dtype(kind) == q.dtype
            ):
                return F.rotary_embedding(q, k, cos, sin)
        return native(q, k, cos, sin, *args, **kwargs)

    return apply_rotary_pos_emb


@functools.cache
def _why_not_trusted(native: Any) -> str | None:
    """Compares ``native`` with ours on a small input, in float32 and bfloat16."""
    partial = KNOWN.get(function_fingerprint(native) or "")
    if partial is None:
        return UNKNOWN
    ours = _function(native, partial, False)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
        ):
            torch.manual_seed(0)
            for dtype in (torch.float32, torch.bfloat16):
                for size in (8, 4) if partial else (8,):
                    _compare(ours, native, size, dtype)
    except (AssertionError, RuntimeError, TypeError) as error:
        return f"{OP} differs from its {FUNCTION} on a small input: {str(error).splitlines()[0]}"
    return None


def _compare(ours: Rotate, native: Rotate, size: int, dtype: torch.dtype) -> None:
    from ...testing import assert_as_good_as_native

    query, key = (torch.randn(2, 5, n, 8).to(dtype).transpose(1, 2) for n in (3, 1))
    tables = [table.to(dtype) for table in torch.randn(2, 2, 5, size)]

    def run(function: Rotate, dtype: torch.dtype) -> list[Tensor]:
        q, k = (x.detach().to(dtype).requires_grad_() for x in (query, key))
        rotated = function(q, k, *(table.to(dtype) for table in tables))
        loss = sum((x * x.detach().cos()).sum() for x in rotated)
        return [*rotated, *torch.autograd.grad(loss, (q, k))]  # type: ignore[arg-type]

    results = run(ours, dtype), run(native, dtype), run(native, torch.float64)
    for mine, theirs, exact in zip(*results, strict=True):
        assert_as_good_as_native(mine, theirs, exact)


# ---- what follows it ----


@functools.cache
def _is_only_attended(forward: Any) -> bool:
    """Whether the rotated query and key only reach the cache and the attention function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    rotations = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == FUNCTION
    ]
    if len(rotations) != 1 or not isinstance(rotations[0].targets[0], ast.Tuple):
        return False
    line = rotations[0].end_lineno or 0
    names = {ast.unparse(target) for target in rotations[0].targets[0].elts}
    reads = {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id in names
        and node.lineno > line
    }
    return reads == {node for node in _handed_on(tree) if node in reads}


def _handed_on(tree: ast.AST) -> Iterator[ast.expr]:
    """The arguments of attention functions and of caches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "attention_interface" or called.endswith(".update"):
                yield from node.args


# ---- the class ----


def _native_function(kind: type[nn.Module]) -> Any:
    """What ``kind``'s forward calls by the name; None if it calls nothing by it."""
    original, _ = undecorated(kind)
    code = getattr(original, "__code__", None)
    if code is None or FUNCTION not in code.co_names:
        return None
    return original.__globals__.get(FUNCTION)


def _with(forward: Any, rotate: Rotate) -> Any:
    """A copy of ``forward`` that calls ``rotate``."""
    scope = {**forward.__globals__, FUNCTION: rotate}
    # torch.compile would look the function up in the module of this name, and find the native one.
    del scope["__name__"]
    copy = types.FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@functools.cache
def _class_for(base: Any) -> Any:
    """``base`` with our function in its forward."""
    original, decorators = undecorated(base)
    native = _native_function(base)
    partial = KNOWN[function_fingerprint(native) or ""]
    exact = _with(original, _function(native, partial, False))
    rounding = exact
    if _is_only_attended(original):
        rounding = _with(original, _function(native, partial, True))

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = getattr(vars(self).get("config"), "_attn_implementation", None)
        run = rounding if chosen in (NAME, NATIVE) else exact
        return run(self, *args, **kwargs)

    return generated_class(COPY_OF, base, forward, decorators, _empty, base)


def _empty(base: Any) -> nn.Module:
    """For pickles. A class that is not trusted here, as in another version, is native."""
    native = _native_function(base)
    kind = _class_for(base) if native is not None and _why_unknown(native) is None else base
    made: nn.Module = kind.__new__(kind)
    return made


def _why_unknown(native: Any) -> str | None:
    return _why_not_trusted(native) if inspect.isfunction(native) else UNKNOWN


# ---- the change to a model ----


def _base_of(module: nn.Module) -> type[nn.Module] | None:
    """The native class of a swapped layer; None for any other."""
    return vars(type(module)).get(COPY_OF)


class _Rotary:
    """The change to one model: the classes of its attention layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def apply(self) -> None:
        for module in self.layers:
            set_class(module, _class_for(class_of(module)))

    def undo(self) -> None:
        for module in self.layers:
            restore(module)


def restore(module: nn.Module) -> bool:
    """Gives a swapped layer its own class back; whether it was one."""
    base = _base_of(module)
    if base is not None:
        set_class(module, base)
    return base is not None


def plan_rotary(
    modules: list[tuple[str, nn.Module]], wanted: frozenset[str], why_left: WhyLeft, plan: Plan
) -> None:
    """Adds to ``plan`` an entry for each layer that rotates query and key, and their change."""
    layers = []
    for name, module in modules:
        native = _native_function(_base_of(module) or type(module))
        if native is None:
            continue
        why = _why_not(module, name, native, wanted, why_left)
        plan.entries.append(SwapEntry(name, type_name(module), OP, why is None, why or ""))
        if why is None:
            layers.append(module)
    if layers:
        plan.changes.append(_Rotary(layers))


def _why_not(
    module: nn.Module, name: str, native: Any, wanted: frozenset[str], why_left: WhyLeft
) -> str | None:
    """The first reason to leave the layer's rotation native; None if it is to be swapped."""
    if _base_of(module) is not None:
        return IS_OURS
    if "forward" in vars(module):
        return REPLACED
    if OP not in wanted:
        return f"{OP} is not in ops"
    why = why_no_block(module) or _why_unknown(native)
    if why is not None:
        return why
    for key, parameter in module.named_parameters():
        why = why_no_kernel(parameter, any_dtype=True) if type(parameter) in PLAIN else None
        if why is not None:
            return f"{key}: {why}"
    return why_left(module, name)
