"""Invalid data that a CUDA kernel found, reported on request.

A label out of range on the GPU makes its row's loss and gradient NaN, and the kernel writes a note
into host memory. The process, the stream and all other rows continue. On the CPU the call raises.
"""

from __future__ import annotations

import torch

from . import _C

__all__ = ["check_errors", "strict"]


def check_errors() -> None:
    """Waits for the GPUs and raises if a kernel found invalid data since the last check.

    Does nothing if no kernel can have found any (no GPU, or none used yet). Does nothing during the
    capture of a CUDA graph, which does not allow waiting.

    Raises:
        IndexError: names the op, the row and the value, for one of the invalid rows. The note is
            cleared.
    """
    devices = _C.error_word_devices()
    if not devices or torch.cuda.is_current_stream_capturing():
        return
    for device in devices:
        torch.cuda.synchronize(device)
    message = _C.take_error()
    if message is not None:
        raise IndexError(message)


class strict:
    """Makes every call that can find invalid data wait for the GPU and raise.

    ``warpwright.strict()`` switches this on, ``strict(False)`` off. ``with strict():`` switches it on
    for a block and then restores the previous setting. It holds for all threads of the process.

    Args:
        enabled: whether calls check.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"strict: enabled: expected a bool, got {type(enabled).__name__}")
        self._before = _C.is_strict()
        _C.set_strict(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *exception: object) -> None:
        _C.set_strict(self._before)
