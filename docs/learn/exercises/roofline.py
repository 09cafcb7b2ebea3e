"""The roofline by hand: how fast can it be, and what limits it?

The rates are measured: a copy's in TB/s, counting bytes read and written, and a matrix product's in TFLOP/s.
"""


def floor_ms(nbytes: float, flops: float, copy_tbs: float, matmul_tflops: float) -> float:
    """The least time in milliseconds."""
    raise NotImplementedError


def bound(nbytes: float, flops: float, copy_tbs: float, matmul_tflops: float) -> str:
    """``"memory"`` or ``"compute"``: which of the two takes longer."""
    raise NotImplementedError


def where_they_meet(itemsize: int, copy_tbs: float, matmul_tflops: float) -> float:
    """The n for which a product of two n × n matrices takes as long in bytes as in FLOPs."""
    raise NotImplementedError
