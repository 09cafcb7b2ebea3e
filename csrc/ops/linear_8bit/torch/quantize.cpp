// quantize_rows on every dispatch key.
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ops/linear_8bit/torch/common.h"
#include "torch/autograd.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

namespace codes_ops {

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& input, at::ScalarType dtype,
                                         bool per_tensor) {
  static const auto op = find_op<std::tuple<Tensor, Tensor>(const Tensor&, at::ScalarType, bool)>(
      "warpwright::quantize_rows");
  return op.call(input, dtype, per_tensor);
}

}  // namespace codes_ops

namespace {

using TensorPair = std::tuple<Tensor, Tensor>;

// ---- output shape and checks ----

void check_quantize(const Tensor& input, at::ScalarType dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_quantizable(input.scalar_type()),
                              "quantize_rows: input: expected float32, bfloat16 or float16, got ",
                              input.scalar_type());
  TORCH_CHECK(input.dim() >= 1,
              "quantize_rows: input: expected at least one dimension, got a number");
  TORCH_CHECK(find_codes(dtype).has_value(),
              "quantize_rows: dtype: expected int8, float8_e4m3fn or float8_e5m2, got ", dtype);
}

TensorPair empty_codes(const Tensor& input, at::ScalarType dtype, bool per_tensor) {
  const auto options = input.options();
  const Tensor codes = at::empty_symint(input.sym_sizes(), options.dtype(dtype));
  const auto scales = per_tensor ? c10::SymDimVector() : with_last(input, 1);
  return {codes, at::empty_symint(scales, options.dtype(at::kFloat))};
}

// ---- CPU and CUDA ----

template <class Run>
TensorPair quantize_with(const Tensor& input, at::ScalarType dtype, bool per_tensor, Run&& run) {
  check_quantize(input, dtype);
  check_has_storage(input, "quantize_rows: input");
  TensorPair result = empty_codes(input, dtype, per_tensor);
  const auto& [codes, scale] = result;
  if (input.numel() == 0) {
    scale.fill_(std::numeric_limits<float>::min());
    return result;
  }
  const int64_t cols = input.size(-1);
  const bool is_matrix = input.dim() == 2 && input.stride(1) == 1 && input.stride(0) >= cols;
  const Tensor rows = is_matrix ? input : input.contiguous();
  run(QuantizeRowsParams{.dtype = dtype_of(input),
                         .codes = *find_codes(dtype),
                         .rows = input.numel() / cols,
                         .cols = cols,
                         .input = rows.const_data_ptr(),
                         .pitch = is_matrix ? input.stride(0) : cols,
                         .output = codes.mutable_data_ptr(),
                         .scale = scale.mutable_data_ptr<float>(),
                         .per_tensor = per_tensor});
  return result;
}

TensorPair quantize_rows_cpu_kernel(const Tensor& input, at::ScalarType dtype, bool per_tensor) {
  return quantize_with(input, dtype, per_tensor, quantize_rows_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
TensorPair quantize_rows_cuda_kernel(const Tensor& input, at::ScalarType dtype, bool per_tensor) {
  const CudaCall call(input);
  return quantize_with(input, dtype, per_tensor, [&](const QuantizeRowsParams& p) {
    const QuantizeRowsPlan plan = choose_quantize_rows(p, current_device_info());
    const Workspace workspace(plan.workspace_bytes, input);
    launch_quantize_rows(p, plan, workspace.data(), call.stream);
  });
}
#endif

// ---- Meta ----

TensorPair quantize_rows_meta(const Tensor& input, at::ScalarType dtype, bool per_tensor) {
  check_quantize(input, dtype);
  return empty_codes(input, dtype, per_tensor);
}

// ---- Autograd: codes are constant almost everywhere, so neither result has a gradient ----

TensorPair quantize_rows_autograd(const Tensor& input, at::ScalarType dtype, bool per_tensor) {
  return below_autograd([&] { return codes_ops::quantize_rows(input, dtype, per_tensor); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("quantize_rows(Tensor input, ScalarType dtype, bool per_tensor=False) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("quantize_rows", quantize_rows_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("quantize_rows", quantize_rows_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("quantize_rows", quantize_rows_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("quantize_rows", quantize_rows_autograd); }

}  // namespace warpwright
