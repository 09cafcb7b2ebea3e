"""Which modules the user leaves native: ``exclude`` and ``filter_fn`` of :func:`warpwright.swap`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .._user_errors import require_function
from .classes import name_of
from .report import FILTERED

Filter = Callable[[nn.Module, str], bool]
# A name, a glob over names, or a class of modules; or several.
Exclude = str | type[nn.Module] | Iterable[str | type[nn.Module]]

# The reason to leave a module native, given with its name; None: none.
WhyLeft = Callable[[nn.Module, str], str | None]


def selection(model: nn.Module, exclude: Exclude | None, filter_fn: Filter | None) -> WhyLeft:
    require_function("filter_fn", filter_fn, "module", "name", optional=True)
    excluded = {} if exclude is None else _excluded(model, exclude)

    def why_left(module: nn.Module, name: str) -> str | None:
        if module in excluded:
            return f"excluded by {excluded[module]}"
        if filter_fn is not None and not filter_fn(module, name):
            return FILTERED
        return None

    return why_left


def _excluded(model: nn.Module, exclude: Exclude) -> dict[nn.Module, str]:
    """{module: what excludes it}. A module is excluded with everything inside of it."""
    wanted = _checked(exclude)
    found: dict[nn.Module, str] = {}
    unused = {each for each in wanted if isinstance(each, str)}
    names = []
    # All names of a shared module count.
    for name, module in model.named_modules(remove_duplicate=False) if wanted else ():
        names.append(name)
        for each in wanted:
            if isinstance(each, type):
                matches, shown = isinstance(module, each), name_of(each)
            else:
                matches, shown = name == each or fnmatchcase(name, each), repr(each)
            if matches:
                unused.discard(each)
                for inner in module.modules():
                    found.setdefault(inner, shown)
    for each in sorted(unused):
        near = get_close_matches(each, names, n=3)
        listed = ", ".join(map(repr, near or names[1:4]))
        if listed:
            listed = f"; {'near it' if near else 'the model has, for example'}: {listed}"
        raise ValueError(
            f"exclude: expected names or globs of model.named_modules(), got {each!r}, which matches none"
            + listed
        )
    return found


def _checked(exclude: Any) -> list[str | type[nn.Module]]:
    """``exclude`` as a list."""
    expected = "exclude: expected names, globs or subclasses of torch.nn.Module"
    if isinstance(exclude, str | type):
        exclude = [exclude]
    elif isinstance(exclude, nn.Module):  # a Sequential is iterable
        exclude = (exclude,)
    elif not isinstance(exclude, Iterable):
        raise TypeError(f"{expected}, got {type(exclude).__name__}")
    wanted = list(exclude)
    for each in wanted:
        if not isinstance(each, str) and not (
            isinstance(each, type) and issubclass(each, nn.Module)
        ):
            got = f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
            if isinstance(each, nn.Module):
                got = f"a {got} itself (its name is meant)"
            raise TypeError(f"{expected}, got {got}")
    return wanted
