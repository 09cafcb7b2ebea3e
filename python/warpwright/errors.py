"""Bad data that a CUDA kernel met: asked for, not waited for.

A label out of range on the GPU makes its row's loss and gradient NaN and leaves a note in host
memory; the process, the stream and every other row go on. On the CPU the call itself raises.
"""

from __future__ import annotations

import torch

from . import _C

__all__ = ["check_errors", "strict"]


def check_errors() -> None:
    """Waits for the GPUs and raises for bad data met since the last check.

    Does nothing where no kernel could have met any (no GPU, or none used yet), nor while a CUDA
    graph is being captured, when waiting is not possible.

    Raises:
        IndexError: names the op, the row and the value; the note is cleared. Of several bad rows it
            names one.
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
    """Makes every call that can meet bad data check at once: it waits for the GPU, and raises.

    ``warpwright.strict()`` switches it on, ``strict(False)`` off; ``with strict():`` does it for a
    block and restores what was. For all threads of the process.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before = _C.is_strict()
        _C.set_strict(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *exception: object) -> None:
        _C.set_strict(self._before)
