from collections.abc import Sequence
from typing import Any

def build_info() -> dict[str, Any]: ...

class Operand:
    def __init__(self, sizes: Sequence[int], strides: Sequence[int], address: int) -> None: ...

class DeviceInfo:
    sm_arch: int
    num_sms: int
    smem_per_block: int
    l2_bytes: int
    def __init__(self) -> None: ...

# Each line is (the kernel's role, what it takes and why).
def explain_relu(dtype: str, input: Operand) -> list[tuple[str, str]]: ...
def explain_linear(
    dtype: str, tf32: bool, input: Operand, weight: Operand, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_max_pool2d(
    dtype: str, input: Operand, channels_last: bool, window: Sequence[int]
) -> list[tuple[str, str]]: ...
