"""The arithmetic of the ladder of a convolution (docs/ladder-conv.md)."""

from __future__ import annotations


def flops(images: int, side: int, channels: int, filters: int, taps: int) -> int:
    """Of a convolution whose output is as large as its input; a multiply-add is two."""
    return 2 * images * side**2 * channels * filters * taps


def image_bytes(images: int, side: int, channels: int, itemsize: int) -> int:
    """Of a batch of images."""
    return images * side**2 * channels * itemsize


def reads_of_a_patch(side: int, reach: int) -> float:
    """How often an element of x is read, if a block has side x side outputs and windows reach that far."""
    return (side + 2 * reach) ** 2 / side**2


def windows_bytes(images: int, side: int, channels: int, taps: int, itemsize: int) -> int:
    """Of a matrix with a window per row."""
    return images * side**2 * channels * taps * itemsize


def under_tap(row: int, col: int, tap: int, side: int) -> tuple[int, int] | None:
    """(row, column) of x under a tap, 0 to 8, of an output's 3x3 window with padding 1; None: the padding."""
    at = row + tap // 3 - 1, col + tap % 3 - 1
    return at if all(0 <= x < side for x in at) else None


def shift_of_tap(tap: int, side: int) -> int:
    """Pixels from the first tap of a 3x3 window to this one, if rows of side + 2 pixels follow each other."""
    return tap // 3 * (side + 2) + tap % 3


def stored_share(side: int, columns: int) -> float:
    """Outputs of an image over the columns of its tiles, which cover its rows of side + 2 places."""
    tiles = -(-side * (side + 2) // columns)
    return side**2 / (tiles * columns)
