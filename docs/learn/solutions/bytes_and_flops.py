"""Answers to exercises/bytes_and_flops.py."""


def relu(numel: int, itemsize: int) -> tuple[int, int]:
    return 2 * numel * itemsize, 3 * numel * itemsize


def linear(rows: int, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    elements = rows * inputs + outputs * inputs + rows * outputs
    return elements * itemsize, 2 * rows * inputs * outputs


def linear_backward(rows: int, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    dy, x, w = rows * outputs, rows * inputs, outputs * inputs
    return (dy + 2 * x + 2 * w) * itemsize, 4 * rows * inputs * outputs


def conv2d(n: int, c: int, h: int, w: int, k: int, r: int, itemsize: int) -> tuple[int, int]:
    elements = n * c * h * w + k * c * r * r + n * k * h * w
    return elements * itemsize, 2 * n * k * h * w * c * r * r
