"""Count the fewest bytes that an op must move, and its FLOPs.

Every input is read once, every output is written once. A multiplication and an addition are two FLOPs.
"""


def relu(numel: int, itemsize: int) -> tuple[int, int]:
    """Bytes of the forward, and of the backward, which reads dy and the saved output."""
    raise NotImplementedError


def linear(rows: int, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes and FLOPs of y = x Wᵀ: x (rows, inputs), W (outputs, inputs), no bias."""
    raise NotImplementedError


def linear_backward(rows: int, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes and FLOPs of dx = dy W and dW = dyᵀ x in one pass: dy counts once."""
    raise NotImplementedError


def conv2d(n: int, c: int, h: int, w: int, k: int, r: int, itemsize: int) -> tuple[int, int]:
    """Bytes and FLOPs: images (n, c, h, w), k filters of c × r × r, output (n, k, h, w)."""
    raise NotImplementedError
