"""Makes ``torch.utils.checkpoint`` recompute under the ``patch()`` blocks of its forward.

A recomputation runs in the backward: after the block, on another thread, or inside ``Tensor.backward``.
A function mode handles that call, and is switched off meanwhile. Checkpoints restore random state, autocast and
the default device, but no function modes. So each checkpoint's function is wrapped when the checkpoint
is made. The wrapper records the active patches and runs the function under exactly these.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import checkpoint

Modes = list[TorchFunctionMode]
Function = Callable[..., Any]
_lock = threading.Lock()
_followed: set[type[TorchFunctionMode]] = set()


def follow(kind: type[TorchFunctionMode]) -> None:
    """From now on a checkpoint keeps the modes of type ``kind`` that are active when it is made.

    Extends both of torch's implementations, at the class that every checkpoint uses. Checkpoints
    without such a mode work as before, so other threads do not notice.
    """
    with _lock:
        if kind in _followed:
            return
        reentrant, frame = checkpoint.CheckpointFunction, checkpoint._CheckpointFrame
        forward: Function = reentrant.forward
        initialise: Function = frame.__init__

        @functools.wraps(forward)
        def forward_(ctx: Any, run_function: Function, *args: Any) -> Any:
            return forward(ctx, _under_same(kind, run_function), *args)

        @functools.wraps(initialise)
        def initialise_(self: Any, recompute_fn: Function, *args: Any, **kwargs: Any) -> None:
            initialise(self, _under_same(kind, recompute_fn), *args, **kwargs)

        reentrant.forward = staticmethod(forward_)  # type: ignore[method-assign, assignment]
        frame.__init__ = initialise_  # type: ignore[method-assign]
        _followed.add(kind)


def _under_same(kind: type[TorchFunctionMode], function: Function) -> Function:
    wanted = _active(kind)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _exactly(kind, wanted):
            return function(*args, **kwargs)

    return run


def _active(kind: type[TorchFunctionMode]) -> Modes:
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, kind)]


@contextlib.contextmanager
def _exactly(kind: type[TorchFunctionMode], wanted: Modes) -> Iterator[None]:
    """Inside the block ``wanted`` are the active modes of type ``kind``; other modes stay."""
    if _active(kind) == wanted:
        yield
        return
    before = _get_current_function_mode_stack()
    _replace([*wanted, *(mode for mode in before if not isinstance(mode, kind))])
    try:
        yield
    finally:
        _replace(before)


def _replace(modes: Modes) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
