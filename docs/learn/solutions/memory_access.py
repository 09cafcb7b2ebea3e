"""Answers to exercises/memory_access.py."""

import math


def sectors(first_byte: int, stride_bytes: int, itemsize: int) -> int:
    # An aligned element of at most 16 bytes lies within one sector.
    return len({(first_byte + lane * stride_bytes) // 32 for lane in range(32)})


def conflict_degree(stride_words: int) -> int:
    # Lanes i and j share a bank if 32 divides (i - j) stride. Stride 0 is one word for all: a broadcast.
    return math.gcd(stride_words, 32) if stride_words else 1


def pitch(columns: int) -> int:
    return columns | 1  # odd: no common divisor with 32
