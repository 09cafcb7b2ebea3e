"""The inputs of ``check=``: how the model is called with them, and what native says to them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._user_errors import as_written, module_of, sentence
from .judge import Call

SHOWN = 8  # arguments of a forward that a message names


def as_call(inputs: Any) -> Call:
    if isinstance(inputs, Mapping):  # a tokenizer's result is no dict
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    raise TypeError(
        "check: expected the model's inputs as a tensor, a tuple of arguments or a dict of keyword "
        f"arguments, got {type(inputs).__name__}"
    )


@contextlib.contextmanager
def native_must_take(model: nn.Module, call: Call) -> Iterator[None]:
    """Around a run of the native model: its error names ``check`` and what came.

    Running out of memory is no fault of the inputs' form and is raised as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name = type(model).__name__
        raise ValueError(
            f"check: expected inputs that the native model takes, as {name}.forward"
            f"({_parameters(model)}); got {name}({_described(call)}), which raises "
            f"{sentence(error)}{module_of(error, model)}. Nothing was swapped"
        ) from error


def loss_of(loss_fn: Callable[[Any], Tensor], output: Any) -> Tensor:
    """The loss of an output, checked."""
    loss = loss_fn(output)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn: expected it to return a scalar tensor, got {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn: expected it to return a scalar tensor, got shape {tuple(loss.shape)}"
        )
    return loss


def _parameters(model: nn.Module) -> str:
    """The names of the forward's parameters; those with a default as ``name=``."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return "…"
    names = [as_written(p) for p in parameters]
    return ", ".join(names[:SHOWN] + ["…"] * (len(names) > SHOWN))


def _described(call: Call) -> str:
    args, kwargs = call
    return ", ".join([_short(v) for v in args] + [f"{k}={_short(v)}" for k, v in kwargs.items()])


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)} on {value.device}"
    return type(value).__name__ if value is not None else "None"
