"""How our layers look to tools that inspect models: torch.fx, torch.jit.script, torch.ao.quantization."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

WAY_OUT = "call warpwright.unswap(model) first"


class LayerType(type):
    """The metaclass of our layers, which makes their instances leaves for ``torch.fx``.

    fx does not enter a module whose ``__module__`` starts with "torch.nn". So an instance reports such
    a name. The class itself reports its own module, by which pickles find it.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
    ) -> Any:
        if body.get("__module__", "").partition(".")[0] == __package__:
            body = {**body, "_own_module": body["__module__"], "__module__": "torch.nn:warpwright"}
        return super().__new__(mcs, name, bases, body, **kwargs)

    @property
    def __module__(cls) -> str:  # type: ignore[override]
        body = vars(cls)
        found: str = body.get("_own_module", body.get("__module__", ""))
        return found

    @__module__.setter
    def __module__(cls, name: str) -> None:
        type.__setattr__(cls, "_own_module", name)

    def __repr__(cls) -> str:
        """Tools that require exact classes print the class that they got."""
        if cls.__module__.partition(".")[0] != __package__:
            return super().__repr__()
        return f"<class '{cls.__module__}.{cls.__qualname__}', which warpwright.unswap undoes>"


class Layer(metaclass=LayerType):
    """The mixin of our layers."""

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script's hook
        refuse_scripting(self)

    @property
    def qconfig(self) -> Any:
        try:
            return vars(self)["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        vars(self)["qconfig"] = value
        warnings.warn(
            "torch.ao.quantization looks for the exact classes of torch.nn, so it leaves warpwright's "
            f"layers in floating point: {WAY_OUT}",
            stacklevel=3,
        )

    @qconfig.deleter
    def qconfig(self) -> None:
        del vars(self)["qconfig"]


def refuse_scripting(module: Any) -> NoReturn:
    raise RuntimeError(
        f"torch.jit.script can't compile warpwright's {type(module).__name__}: {WAY_OUT}, or use "
        "torch.jit.trace, torch.compile or torch.export"
    )


class Named(Layer):
    """A layer whose ``repr`` starts with "warpwright."."""

    def _get_name(self) -> str:
        return f"warpwright.{type(self).__name__}"
