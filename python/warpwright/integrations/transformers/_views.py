"""Views of configs, which select another attention function for single layers of a model."""

from __future__ import annotations

import copy
import functools
from typing import Any

NAME = "warpwright"
NATIVE = "sdpa"


class View:
    """Mixed into the class of a view; see :func:`view_of`."""

    __slots__ = ()
    _warpwright_native: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Stops here, because transformers 5 makes each subclass of its configs a dataclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return view_of, (self._warpwright_native,)

    def __setattr__(self, key: str, value: Any) -> None:
        # A model made from a view writes back what it read; the config keeps transformers' choice.
        if key == "_attn_implementation_internal" and value == NAME:
            value = NATIVE
        super().__setattr__(key, value)

    def __eq__(self, other: object) -> bool:
        native = other._warpwright_native if isinstance(other, View) else other
        return bool(self._warpwright_native == native)

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Any:
        return copy.copy(self._warpwright_native)


@functools.cache
def _view_class(kind: type) -> Any:
    def implementation(self: Any) -> Any:
        chosen = self._attn_implementation_internal
        return NAME if chosen == NATIVE else chosen

    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__slots__": ("_warpwright_native",),
        "_attn_implementation": property(implementation, kind._attn_implementation.fset),  # type: ignore[attr-defined]
    }
    return type(kind.__name__, (View, kind), body)


def view_of(config: Any) -> Any:
    """A second object with the attributes of ``config``, which answers "warpwright" for "sdpa".

    Both share one ``__dict__``: what is set on either is set on both, and either saves what
    transformers chose.
    """
    native: Any = type(config)
    kind = _view_class(native)
    view = object.__new__(kind)
    view.__dict__ = config.__dict__
    view._warpwright_native = config
    return view
