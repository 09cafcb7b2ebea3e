from collections.abc import Callable, Sequence
from typing import Any

def build_info() -> dict[str, Any]: ...
def direct_call(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]: ...

class Operand:
    def __init__(self, sizes: Sequence[int], strides: Sequence[int], address: int) -> None: ...

class DeviceInfo:
    sm_arch: int
    num_sms: int
    smem_per_block: int
    l2_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    def __init__(self) -> None: ...

def named_devices() -> dict[str, DeviceInfo]: ...

# Each line is (the kernel's role, what it takes and why).
def explain_batch_norm(
    dtype: str, input: Operand, rows: bool, operands: int, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_group_norm(
    dtype: str, input: Operand, rows: bool, groups: int, sm90: bool, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_squeeze_excitation(
    dtype: str, input: Operand, rows: bool, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_layer_norm(
    dtype: str,
    centered: bool,
    adds: bool,
    input: Operand,
    normalized_dims: int,
    device: DeviceInfo,
) -> list[tuple[str, str]]: ...
def explain_conv2d(
    dtype: str,
    tf32: bool,
    input: Operand,
    weight: Operand,
    output: Sequence[int],
    channels_last: bool,
    window: Sequence[int],
    groups: int,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def explain_conv2d_cpu(
    dtype: str,
    input: Operand,
    weight: Operand,
    output: Sequence[int],
    channels_last: bool,
    window: Sequence[int],
    groups: int,
    onednn: bool,
    avx512: bool,
) -> list[tuple[str, str]]: ...
def explain_conv_transpose2d(
    dtype: str,
    tf32: bool,
    input: Operand,
    weight: Operand,
    bias: int,
    output: Sequence[int],
    pixels: Sequence[int],
    channels_last: bool,
    window: Sequence[int],
    groups: int,
    pitch: int,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def explain_conv_transpose2d_cpu(
    dtype: str,
    input: Operand,
    weight: Operand,
    output: Sequence[int],
    pixels: Sequence[int],
    channels_last: bool,
    window: Sequence[int],
    groups: int,
    onednn: bool,
    avx512: bool,
) -> list[tuple[str, str]]: ...
def explain_conv2d_moments(
    dtype: str,
    input: Operand,
    weight: Operand,
    output: Sequence[int],
    channels_last: bool,
    window: Sequence[int],
    groups: int,
    operands: int,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def explain_conv_norm_pool(
    dtype: str,
    input: Operand,
    weight: Operand,
    output: Sequence[int],
    channels_last: bool,
    window: Sequence[int],
    groups: int,
    pool: Sequence[int],
    pooled: Sequence[int],
    device: DeviceInfo,
) -> list[tuple[str, str]]: ...
def explain_cross_entropy(
    dtype: str,
    input: Operand,
    probabilities: bool,
    smoothed: bool,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def explain_linear(
    dtype: str,
    tf32: bool,
    input: Operand,
    weight: Operand,
    device: DeviceInfo,
    sm90: bool,
    tf32x3: bool = False,
    bias: bool = True,
) -> list[tuple[str, str]]: ...

# Predicted bytes: from L2 to the SMs ("l2"), "dram_read" and "dram_written".
def gemm_traffic(
    mnk: Sequence[int],
    size: int,
    tile: Sequence[int],
    device: DeviceInfo,
    splits: int = 1,
    sharing: int = 1,
    raster_rows: int = ...,
) -> dict[str, float]: ...
def linear_traffic(
    dtype: str, input: Operand, weight: Operand, device: DeviceInfo
) -> dict[str, dict[str, float]]: ...
def explain_linear_cross_entropy(
    dtype: str,
    tf32: bool,
    input: Operand,
    weight: Operand,
    chunk_rows: int,
    device: DeviceInfo,
    sm90: bool,
    tf32x3: bool = False,
) -> list[tuple[str, str]]: ...
def explain_linear_quantized(
    dtype: str,
    input: Operand,
    is_int8: bool,
    fragments: bool,
    codes: Operand,
    scale_dtype: str,
    scales: Operand,
    zeros: Operand | None,
    device: DeviceInfo,
    sm90: bool,
    gradient: bool,
) -> tuple[str, bool]: ...
def explain_mlp(
    dtype: str, hidden: Operand, weight: Operand, device: DeviceInfo, sm90: bool
) -> tuple[str, bool]: ...
def explain_max_pool2d(
    dtype: str,
    input: Operand,
    channels_last: bool,
    window: Sequence[int],
    output: Sequence[int],
) -> list[tuple[str, str]]: ...
def explain_softmax(
    dtype: str, output_dtype: str, input: Operand, dim: int, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_embedding(
    dtype: str, weight: Operand, count: int, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_reduction_cpu(
    kind: str, dtype: str, input: Operand, dims: list[int]
) -> list[tuple[str, str]]: ...
def explain_reduction(
    kind: str, dtype: str, input: Operand, dims: list[int], device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_global_avg_pool2d(
    dtype: str, input: Operand, channels_last: bool, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_scan(op: str, dtype: str, input: Operand, dim: int) -> list[tuple[str, str]]: ...
def explain_gated_activation(dtype: str, gate: Operand, packed: bool) -> list[tuple[str, str]]: ...
def explain_layer_scale_add(
    dtype: str,
    residual_dtype: str,
    output_dtype: str,
    input: Operand,
    residual: Operand,
    channel: int,
    scales_samples: bool,
    device: DeviceInfo,
) -> list[tuple[str, str]]: ...
def explain_rotary_embedding(
    dtype: str, table_dtype: str, query: Operand, key: Operand, cos: Operand, sin: Operand
) -> list[tuple[str, str]]: ...
def explain_quantize_rows(
    dtype: str, codes: str, input: Operand, per_tensor: bool, device: DeviceInfo
) -> list[tuple[str, str]]: ...
def explain_product_8bit(
    codes: str,
    result: str,
    input: Operand,
    weight: Operand,
    exact: bool,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def explain_attention_with_kv_cache(
    dtype: str,
    query: Operand,
    k_cache: Operand,
    v_cache: Operand,
    added: list[Operand],
    max_pages: int,
    device: DeviceInfo,
) -> list[tuple[str, str]]: ...
def explain_attention_varlen(
    dtype: str,
    query: Operand,
    key: Operand,
    value: Operand,
    sequences: int,
    max_lengths: tuple[int, int],
    scale: float,
    is_causal: bool,
    window: tuple[int, int],
    softcap: float,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def explain_relu(dtype: str, input: Operand) -> list[tuple[str, str]]: ...
def explain_activation_cpu(
    activation: str, is_contiguous_float32: bool, numel: int, onednn: bool
) -> list[tuple[str, str]]: ...
def explain_activation(dtype: str, input: Operand) -> list[tuple[str, str]]: ...
def explain_dropout(dtype: str, input: Operand) -> list[tuple[str, str]]: ...
def explain_scaled_dot_product_attention(
    dtype: str,
    query: Operand,
    key: Operand,
    value: Operand,
    scale: float,
    mask_dtype: str,
    mask: Operand,
    mask_needs_grad: bool,
    dropout: bool,
    is_causal: bool,
    window: tuple[int, int],
    softcap: float,
    device: DeviceInfo,
    sm90: bool,
) -> list[tuple[str, str]]: ...
def take_error() -> str | None: ...
def error_word_devices() -> list[int]: ...
def is_strict() -> bool: ...
def set_strict(strict: bool) -> None: ...
def record_weight_casts() -> None: ...
def count_weight_casts() -> int: ...
def weight_cast_type(impl: int) -> int: ...
def allow_weight_copies_in_capture(allow: bool) -> bool: ...
def float32_precision() -> int: ...
def set_float32_precision(level: int) -> None: ...

class FftConvCall:
    def __init__(
        self,
        dtype: str,
        input: Sequence[int],
        weight: Sequence[int],
        padding: Sequence[int],
        groups: int,
    ) -> None: ...

def explain_fft_conv(
    call: FftConvCall, tf32: bool, device: DeviceInfo | None
) -> list[tuple[str, str]]: ...
def fft_conv_pays(call: FftConvCall, tf32: bool, device: DeviceInfo | None) -> bool: ...
