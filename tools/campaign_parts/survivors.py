"""Why a fault survives: what a person found by reading. A fault that is not here is a gap of the tests."""

from __future__ import annotations

from .mutate import Mutant

AGAIN = "a later check says the same"
SLOWER = "takes another way to the same result"

# By file, and the beginning of the source line.
REASONS = {
    ("cpu/activation.h", "const V a = at_most("): "exp(-a^2 / 2) is 0 from 15 on",
    ("cpu/exp.h", "const Bits half = whole >> 1"): "two other factors of the same power of two",
    ("cpu/lane_runs.h", "__builtin_convertvector(__builtin_shuffle"): "compiled without AVX2 alone",
    ("cpu/lanes.h", "for (int i = 0; i < kLanes<T>;"): "compiled without F16C alone",
    (
        "ops/attention/torch/ops.cpp",
        "check_softcap(",
    ): "the meta function's; the kernels check, too",
    (
        "ops/attention/torch/second_order.cpp",
        "for (int64_t begin = 0; begin < S_q",
    ): "one more turn, over no rows",
    ("ops/attention/torch/varlen.h", "int64_t max_q = 0, max_k = 0;"): "every call sets both",
    ("ops/batch_norm/cpu/channels.h", "double result = 0;"): "overwritten for every type",
    (
        "ops/batch_norm/torch/activation_ops.cpp",
        "if (input.dim() > 1) shape[1]",
    ): "an input of one dimension was refused before",
    (
        "ops/batch_norm/torch/relu_ops.cpp",
        "check_backward(grad_output, input, value_or_undefined(weight)",
    ): "the meta function's; the kernels check, too",
    (
        "ops/batch_norm_relu_max_pool2d/torch/common.h",
        "check_same_device(codes, input",
    ): AGAIN,
    ("ops/conv2d_batch_norm/torch/common.h", ".momentum = 0"): "read with running statistics alone",
    (
        "ops/cross_entropy/cpu/rows.h",
        "if (count == Lanes<T>::size())",
    ): "reads past a row's end into lanes that callers fill; a fault for AddressSanitizer",
    (
        "ops/cross_entropy/torch/autograd.cpp",
        "const int64_t classes = std::max<int64_t>(1, input.size",
    ): "for CUDA tensors alone",
    (
        "ops/cross_entropy/torch/autograd.cpp",
        "return rows && rows->class_stride == 1",
    ): "for CUDA tensors alone",
    (
        "ops/cross_entropy/torch/common.h",
        "if (sizes[c] != 1) rows.class_stride",
    ): "one class needs no stride",
    (
        "ops/fft_conv/cuda/fused/gradient_planes.cuh",
        "if (threadIdx.x == 0) p.flags[channel]",
    ): "all threads write the same byte",
    (
        "ops/layer_norm/cpu/layer_norm_loops_cpu.cpp",
        "rows_ = 0;",
    ): "a block's sums become double one row earlier",
    (
        "ops/layer_norm/torch/ops.cpp",
        "const Tensor rows = dtype == input.scalar_type()",
    ): "autocast for CUDA tensors",
    ("ops/linear/torch/common.h", "Tensor workspace(int64_t size)"): "no plan asks for one byte",
    ("ops/linear_cross_entropy/torch/autograd.cpp", "gradient.use_count() <="): SLOWER,
    ("ops/linear_cross_entropy/torch/call.cpp", "check_plain_storage(target"): AGAIN,
    (
        "ops/linear_quantized/cuda/operand.cuh",
        "for (int i = 0; i < 4; ++i) {",
    ): "writes an element behind a local array, which nothing reads",
    (
        "ops/linear_quantized/cpu/linear_quantized.cpp",
        "if (row >= w_.outputs || w_.fragments) return;",
    ): "decides what is prefetched",
    ("ops/optim/optim_cpu.cpp", "numel += numel_of(i);"): "decides how work is split",
    ("ops/optim/optim_torch.cpp", "check_same_dtype(op, first, largest)"): AGAIN,
    ("ops/reduction/torch/amax_ops.cpp", "if (numel.has_value()"): SLOWER,
    ("torch/philox.h", "values[1] = 0;"): "another part of the same random sequence",
    (
        "torch/weight_copies.cpp",
        "limit = 2 * entries.size() + 1024;",
    ): "decides when dead entries are dropped",
}


def reason(mutant: Mutant) -> str:
    """Empty if none is known."""
    for (file, text), why in REASONS.items():
        if mutant.file == file and mutant.text.startswith(text):
            return why
    return ""
