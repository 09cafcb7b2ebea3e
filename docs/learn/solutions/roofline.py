"""Answers to exercises/roofline.py."""


def floor_ms(nbytes: float, flops: float, copy_tbs: float, matmul_tflops: float) -> float:
    # 1 TB/s is 1e9 bytes per millisecond.
    return max(nbytes / copy_tbs, flops / matmul_tflops) / 1e9


def bound(nbytes: float, flops: float, copy_tbs: float, matmul_tflops: float) -> str:
    return "memory" if nbytes / copy_tbs > flops / matmul_tflops else "compute"


def where_they_meet(itemsize: int, copy_tbs: float, matmul_tflops: float) -> float:
    # 3 n² itemsize / copy = 2 n³ / matmul
    return 1.5 * itemsize * matmul_tflops / copy_tbs
