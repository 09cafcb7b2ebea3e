"""The arithmetic of the ladder of a convolution (docs/ladder-conv.md)."""

from __future__ import annotations


def flops(images: int, side: int, channels: int, filters: int, taps: int) -> int:
    """Of a convolution whose output is as large as its input; a multiply-add is two."""
    raise NotImplementedError


def image_bytes(images: int, side: int, channels: int, itemsize: int) -> int:
    """Of a batch of images."""
    raise NotImplementedError


def reads_of_a_patch(side: int, reach: int) -> float:
    """How often an element of x is read, if a block has side x side outputs and windows reach that far."""
    raise NotImplementedError


def windows_bytes(images: int, side: int, channels: int, taps: int, itemsize: int) -> int:
    """Of a matrix with a window per row."""
    raise NotImplementedError


def under_tap(row: int, col: int, tap: int, side: int) -> tuple[int, int] | None:
    """(row, column) of x under a tap, 0 to 8, of an output's 3x3 window with padding 1; None: the padding."""
    raise NotImplementedError


def shift_of_tap(tap: int, side: int) -> int:
    """Pixels from the first tap of a 3x3 window to this one, if rows of side + 2 pixels follow each other."""
    raise NotImplementedError


def stored_share(side: int, columns: int) -> float:
    """Outputs of an image over the columns of its tiles, which cover its rows of side + 2 places."""
    raise NotImplementedError
