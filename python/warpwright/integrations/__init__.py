"""What :func:`warpwright.swap` changes in models of other libraries, apart from layers' classes.

Each library has a module here, which imports the library. It is imported only if the library
already is; otherwise no model can be of that library. The module has two functions:

- ``plan(model, wanted, why_left, chosen) -> Plan``: which changes are possible, and why others are not.
  Changes nothing. ``why_left`` has the user's reasons, ``chosen`` the layers that get another class.
- ``undo(model) -> int``: undoes every change found in ``model``; returns the number of layers.

A change concerns instances, never the library, so other models in the process stay as they are. The
model itself holds it: it survives ``copy.deepcopy`` and pickling, and ``undo`` finds it in the copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from ..swap.report import SwapEntry
    from ..swap.selection import WhyLeft

__all__ = ["Change", "Plan", "loaded", "register_attention"]

# The module here -> two modules of its library. The import of the first means that there may be
# models of the library. Only supported versions have the second (transformers: 4.53 or newer).
LIBRARIES = {
    "timm": ("timm.layers", "timm.layers.norm"),
    "torchvision": ("torchvision.models", "torchvision.ops.misc"),
    "transformers": ("transformers.modeling_utils", "transformers.masking_utils"),
}


class Change(Protocol):
    """A reversible change to a model that is not a change of a layer's class."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class Plan:
    """What a library's module would do to a model."""

    entries: list[SwapEntry] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    # Layers that get a class of the library's module in place of the usual one; and a remark on each.
    classes: dict[nn.Module, type[nn.Module]] = field(default_factory=dict)
    notes: dict[nn.Module, str] = field(default_factory=dict)


class Integration(Protocol):
    def plan(
        self,
        model: nn.Module,
        wanted: frozenset[str],
        why_left: WhyLeft,
        chosen: Mapping[nn.Module, type[nn.Module]],
    ) -> Plan: ...

    def undo(self, model: nn.Module) -> int: ...


def loaded() -> Iterator[Integration]:
    """The modules here whose library is imported."""
    for name, (models, needed) in LIBRARIES.items():
        if models in sys.modules and importlib.util.find_spec(needed) is not None:
            module: Any = importlib.import_module(f".{name}", __package__)
            yield module


def register_attention() -> None:
    """Makes ``attn_implementation="warpwright"`` known to transformers.

    :func:`warpwright.swap` does this by itself. The call adds one name to transformers' registries of
    attention and mask functions. A model uses it only if it is asked to, by :func:`warpwright.swap` or by
    ``from_pretrained(..., attn_implementation="warpwright")``.

    Raises:
        ImportError: transformers is missing or older than 4.53.
    """
    importlib.import_module(".transformers", __package__).register()
