"""transformers' models: attention on warpwright's kernel, and causal attention as a flag.

transformers looks an attention function up by ``config._attn_implementation``, and a mask function
by the same name. :func:`register` adds ours, as "warpwright". A swapped attention layer gets a view
of its config (:func:`_view`) that answers "warpwright" where the config answers "sdpa"; the config
itself, which other models may share and which is saved, keeps what it holds.

Masks. transformers' mask functions return None if attention can be told the mask by ``is_causal``
alone. While a graph is traced or captured they can't read values, so they build the mask: dense,
(batch, 1, queries, keys), and K and V are then repeated for all heads. :func:`_needs_no_mask`
returns None as well wherever the arguments alone say enough. One case needs a proof from outside.
Position ids may pack several sequences into one row, and without a cache the mask function gets an
overlay that separates them even if the model itself has just counted the positions. Hooks on the
module that makes the masks (:func:`_enter`, :func:`_leave`) note whether its caller gave any.
In all other cases the mask is the one that transformers builds.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .. import functional
from .._arch import FLOATING, why_no_kernel
from ..swap import FILTERED, IS_OURS, REPLACED, SwapEntry, type_name
from . import Plan

try:
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"warpwright: transformers 4.53 or newer is needed; {transformers.__version__} is installed"
    ) from error
from transformers.integrations import sdpa_attention

__all__ = ["NAME", "OP", "plan", "register", "undo"]

NAME = "warpwright"
OP = "scaled_dot_product_attention"
NATIVE = "sdpa"

native_attention = sdpa_attention.sdpa_attention_forward
native_mask = masking_utils.sdpa_mask


def register() -> None:
    """Adds our attention and mask functions to transformers' registries."""
    type(ALL_ATTENTION_FUNCTIONS).register(NAME, attention)
    type(ALL_MASK_ATTENTION_FUNCTIONS).register(NAME, mask)


# --- attention -----------------------------------------------------------------------------------

# Arguments of transformers' function that ours has no form of, if they are given.
NOT_OURS = ("softcap", "s_aux", "cache", "output_attentions")


def _runs_here(query: Tensor, kwargs: dict[str, Any]) -> bool:
    for name in NOT_OURS:
        if kwargs.get(name):
            return False
    if torch.compiler.is_compiling():
        return query.dtype in FLOATING
    return why_no_kernel(query) is None and not torch.jit.is_tracing()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' "sdpa", with K and V never repeated: (batch, queries, heads, head size)."""
    if not _runs_here(query, kwargs):
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        output: tuple[Tensor, None] = native_attention(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output
    queries = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # The shape first: with dynamic shapes it is symbolic, and the op wants a bool.
    is_causal = queries > 1 and attention_mask is None and is_causal
    if is_causal and key.shape[2] > queries:
        # The first step of a static cache: no query sees the slots that are still empty.
        key, value = key[:, :, :queries], value[:, :, :queries]
        if position_bias is not None:
            position_bias = position_bias[:, :, :, :queries]
    if attention_mask is not None and attention_mask.ndim == 4:
        attention_mask = attention_mask[:, :, :, : key.shape[2]]
    if position_bias is not None:
        attention_mask = sdpa_attention.create_position_bias_mask(
            position_bias, attention_mask, is_causal, query, key
        )
        is_causal = False
    result = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        is_causal,
        scale=scaling,
        enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
    )
    return result.transpose(1, 2).contiguous(), None


# --- masks ---------------------------------------------------------------------------------------


class _Proofs(threading.local):
    """Per thread: (the innermost module that makes masks has counted its positions, the outer)."""

    def __init__(self) -> None:
        self.top: tuple[bool, Any] | None = None


_proofs = _Proofs()

# The arguments of a forward that can make a causal mask more than causal.
TELLING = ("attention_mask", "position_ids", "past_key_values", "past_key_value", "cache_position")


def _given_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward gets its input alone, which is its first argument if it is positional."""
    for value in args[1:]:
        if value is not None:
            return False
    return all(kwargs.get(name) is None for name in TELLING)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A pre-hook of modules that make masks and count positions from 0 if they are given none."""
    _proofs.top = (_given_nothing(args, kwargs), _proofs.top)


def _enter_unproven(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A pre-hook of other modules that make masks: hides the proof of a module around them."""
    _proofs.top = (False, _proofs.top)


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Their forward hook; runs after an exception too."""
    if _proofs.top is not None:
        _proofs.top = _proofs.top[1]


_PACKED = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


def _needs_no_mask(
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> bool:
    """Whether ``is_causal`` or nothing says the same as the mask, by the arguments alone.

    The arguments are those of transformers' mask functions. ``allow_is_causal_skip`` says that
    ``mask_function`` is causal within ``local_size`` keys and nothing more.
    """
    if attention_mask is not None or isinstance(q_offset, Tensor) or torch.jit.is_tracing():
        return False
    if allow_is_bidirectional_skip:
        return local_size is None or kv_length < local_size
    if q_length is None:  # transformers 4: the positions in place of their number
        if cache_position is None:
            return False
        q_length = cache_position.shape[0]
    from_start = kv_length == q_length and kv_offset == 0 and q_offset == 0
    if local_size is not None and (
        kv_length > local_size or (kv_length == local_size and not from_start)
    ):
        return False
    if allow_is_causal_skip:
        return from_start or q_length == 1
    # Refused, by an overlay that separates packed sequences. The proof is that there are none: of
    # a module in which no other overlay is possible (_counts_positions).
    top = _proofs.top
    return from_start and top is not None and top[0] and mask_function.__code__ is _PACKED


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """As transformers' mask for "sdpa": boolean, or None if attention's flag is enough."""
    if not args and _needs_no_mask(**kwargs):
        return None
    made: Tensor | None = native_mask(*args, **kwargs)
    return made


# --- which modules take part ---------------------------------------------------------------------

_MODEL = transformers.PreTrainedModel
_OWN_BRANCH = re.compile(r"config\._attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
# What else can make a causal mask more than causal, or forbid to leave it out.
_OVERLAYS = re.compile(
    r"\b(or_mask_function|and_mask_function|block_sequence_ids|allow_is_\w+_skip|indexed_attention)\b"
)
_SHAPING = {"arange", "unsqueeze", "expand", "view", "repeat", "to", "size", "get_seq_length"}


def _sources(kind: type) -> str | None:
    """The source of ``kind`` and of its bases outside torch and PreTrainedModel's; None if missing."""
    found = []
    for base in kind.__mro__:
        if base in _MODEL.__mro__ or base.__module__.split(".")[0] in ("torch", "warpwright"):
            continue
        if base.__module__ in ("builtins", "transformers.generation.utils"):
            continue
        try:
            found.append(inspect.getsource(base))
        except (OSError, TypeError):
            return None
    return "\n".join(found)


def _module_source(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    try:
        return inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return ""


@functools.cache
def _makes_masks(kind: type) -> bool:
    """Whether a forward of ``kind`` calls transformers' mask functions, and no mask code of its own."""
    source = _sources(kind)
    if not source or _OWN_BRANCH.search(source):
        return False
    names = vars(sys.modules[kind.__module__])

    def makes(name: str) -> bool:
        function = names.get(name)
        home = getattr(function, "__module__", None)
        if home == masking_utils.__name__:
            return True
        # A function of the same file that does, one level deep.
        if home != kind.__module__ or not inspect.isfunction(function):
            return False
        return any(
            getattr(names.get(inner), "__module__", None) == masking_utils.__name__
            for inner in function.__code__.co_names
        )

    return any(makes(name) for name in set(re.findall(r"\w+", source)))


@functools.cache
def _counts_positions(kind: type) -> bool:
    """Whether position ids that the forward of ``kind`` makes itself always count up by 1.

    Read from its source: each assignment to a name that ends in ``position_ids`` is ``arange`` or
    ``cache_position``, shifted by a number and reshaped. No overlay but that of packed sequences may
    be mentioned in its file.
    """
    if _OVERLAYS.search(_module_source(kind)) or not _module_source(kind):
        return False
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        if not any(_is_position_ids(target) for target in targets):
            continue
        if not isinstance(node, ast.Assign) or not _counts(node.value):
            return False
    return True


def _is_position_ids(target: ast.expr) -> bool:
    names = (ast.unparse(part) for part in ast.walk(target) if isinstance(part, ast.expr))
    return any(name.endswith("position_ids") for name in names)


def _counts(value: ast.expr) -> bool:
    """``torch.arange(...) + offset``, ``cache_position.unsqueeze(0)``, ``position_ids[0]`` ..."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name not in _SHAPING:
                return False
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add):
            return False
        elif isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.NamedExpr)):
            return False
    text = ast.unparse(value)
    return "arange(" in text or "cache_position" in text or text.startswith("position_ids")


def _attends(kind: type) -> bool:
    """Whether the forward of ``kind`` takes its attention function from transformers' registry."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _attends_itself(kind: type) -> bool:
    """Whether ``kind`` is named an attention layer and computes attention without the registry."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    names = code.co_names if code is not None else ()
    return "Attention" in kind.__name__ and (
        OP in names or ("softmax" in names and "matmul" in names)
    )


# --- views of configs ----------------------------------------------------------------------------


class _View:
    """Mixed into the class of a view; see :func:`_view`."""

    __slots__ = ()
    _warpwright_native: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # transformers 5 makes each subclass of its configs a dataclass; a view has the same fields.
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _view, (self._warpwright_native,)

    def __copy__(self) -> Any:
        return copy.copy(self._warpwright_native)


@functools.cache
def _view_class(kind: type) -> Any:
    base: Any = kind._attn_implementation  # type: ignore[attr-defined]

    def implementation(self: Any) -> Any:
        chosen = self._attn_implementation_internal
        return NAME if chosen == NATIVE else chosen

    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__slots__": ("_warpwright_native",),
        "_attn_implementation": property(implementation, base.fset),
    }
    return type(kind.__name__, (_View, kind), body)


def _view(config: Any) -> Any:
    """A second object with the attributes of ``config``, which answers "warpwright" for "sdpa".

    Both share one ``__dict__``: what is set on either is set on both, and saving either saves
    what transformers chose.
    """
    kind = _view_class(type(config))
    view = object.__new__(kind)
    view.__dict__ = config.__dict__
    kind._warpwright_native.__set__(view, config)
    return view


# --- the plan ------------------------------------------------------------------------------------


class _Attention:
    """The change to one model: views in ``modules``, hooks on ``makers`` of masks."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, Any] = {}  # -> the view
        self.makers: list[nn.Module] = []

    def apply(self) -> None:
        register()
        for module, view in self.modules.items():
            vars(module)["config"] = view
        for module in self.makers:
            if _counts_positions(type(module)):
                module.register_forward_pre_hook(_enter, with_kwargs=True)
            else:
                module.register_forward_pre_hook(_enter_unproven)
            module.register_forward_hook(_leave, always_call=True)

    def undo(self) -> None:
        for module in self.modules:
            _restore(module)
        for module in self.makers:
            _unhook(module)


def _restore(module: nn.Module) -> bool:
    config = vars(module).get("config")
    if not isinstance(config, _View):
        return False
    vars(module)["config"] = config._warpwright_native
    return True


def _hooked(module: nn.Module) -> bool:
    return any(hook is _leave for hook in module._forward_hooks.values())


def _unhook(module: nn.Module) -> None:
    tables = (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (
            module._forward_hooks,
            (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ),
    )
    for hooks, marks in tables:
        ours = [key for key, hook in hooks.items() if hook in (_enter, _enter_unproven, _leave)]
        for key in ours:
            del hooks[key]
            for mark in marks:
                mark.pop(key, None)


def undo(model: nn.Module) -> int:
    """Gives each module its config back; returns how many attention layers ran on warpwright."""
    found = 0
    for module in model.modules():
        _unhook(module)
        found += _restore(module) and _attends(type(module))
    return found


def _within_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of every model of transformers in ``model``, with their names there."""
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, _MODEL) and module not in seen:
            for inner, child in module.named_modules(prefix=name):
                if child not in seen:
                    seen.add(child)
                    yield inner, child


def plan(
    model: nn.Module,
    wanted: frozenset[str],
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> Plan:
    """An entry for each attention layer, and the change that swaps them."""
    found = Plan()
    change = _Attention()
    modules = list(_within_models(model))
    layers: list[tuple[str, nn.Module, str | None]] = []
    for name, module in modules:
        if _attends(type(module)):
            layers.append((name, module, _why_not(module, name, wanted, filter_fn)))
        elif _attends_itself(type(module)):
            why = f"computes attention in its own code, not by transformers {transformers.__version__}'s registry"
            layers.append((name, module, why))
    views: dict[int, Any] = {}
    for _, module, why in layers:
        if why is None:
            config = module.config
            change.modules[module] = views.setdefault(id(config), _view(config))
    kept: dict[int, bool] = {}  # a config's id -> whether its masks may stay a flag
    for _, module in modules:
        config = vars(module).get("config")
        native = config._warpwright_native if isinstance(config, _View) else config
        uses = id(native) in views or getattr(config, "_attn_implementation", None) == NAME
        if not uses or not _makes_masks(type(module)):
            continue
        kept[id(native)] = _counts_positions(type(module))
        if not _hooked(module):
            change.makers.append(module)
        if id(native) in views and not isinstance(config, _View):
            change.modules[module] = views[id(native)]
    for name, module, why in layers:
        note = _note(kept.get(id(vars(module).get("config")))) if why is None else ""
        entry = SwapEntry(name, type_name(module), OP, why is None, why or "", note=note)
        found.entries.append(entry)
    if change.modules or change.makers:
        found.changes.append(change)
    return found


def _note(kept: bool | None) -> str:
    if kept is None:
        return "masks are transformers' own"
    if kept:
        return "plain causal calls pass a flag, others transformers' mask"
    return "causal calls with a cache pass a flag, others transformers' mask"


def _why_not(
    module: nn.Module,
    name: str,
    wanted: frozenset[str],
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> str | None:
    """The first reason to leave the attention layer native; None if it is to be swapped."""
    config = vars(module).get("config")
    chosen = getattr(config, "_attn_implementation", None)
    if chosen == NAME:
        return IS_OURS
    if "forward" in vars(module):
        return REPLACED
    if OP not in wanted:
        return f"{OP} is not in ops"
    if not isinstance(getattr(type(config), "_attn_implementation", None), property):
        return "no config in it to name an attention function"
    if chosen == "eager":
        return "attn_implementation is 'eager': the user's choice, or transformers' for this model"
    if chosen != NATIVE:
        return f"attn_implementation is {chosen!r}, not 'sdpa'"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "soft-capped scores, which warpwright's attention has not"
    source = _sources(type(module))
    if source is None or _OWN_BRANCH.search(source):
        return "its code asks for 'sdpa' by name"
    for parameter in module.parameters():
        why = why_no_kernel(parameter, any_dtype=True)
        if why is not None:
            return f"its parameters: {why}"
    if filter_fn is not None and not filter_fn(module, name):
        return FILTERED
    return None


register()
