"""What one load of a warp costs. A warp has 32 lanes."""


def sectors(first_byte: int, stride_bytes: int, itemsize: int) -> int:
    """Global memory moves sectors: 32 bytes at multiples of 32.

    Lane i reads ``itemsize`` bytes at ``first_byte + i * stride_bytes``; both are multiples of ``itemsize``, a
    power of two up to 16. How many different sectors is that?
    """
    raise NotImplementedError


def conflict_degree(stride_words: int) -> int:
    """Shared memory has 32 banks; 4-byte word w is in bank w % 32.

    Lane i reads word ``i * stride_words``. A bank delivers one word per pass, to every lane that wants it. How many
    passes does the load take?
    """
    raise NotImplementedError


def pitch(columns: int) -> int:
    """The fewest words per row, at least ``columns``, so that a warp reads down a column in one pass."""
    raise NotImplementedError
