// Shared by the files of torch/: calls through the dispatcher, and checks of codes and scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "ops/linear_8bit/linear_8bit.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

namespace warpwright {

namespace codes_ops {

// The codes and the scales of x.
std::tuple<Tensor, Tensor> quantize_rows(const Tensor& input, at::ScalarType dtype,
                                         bool per_tensor);

Tensor scaled_linear(const Tensor& input, const OptionalTensor& input_scale, const Tensor& weight,
                     const OptionalTensor& weight_scale, const OptionalTensor& bias,
                     at::ScalarType out_dtype, bool use_fast_accum);

}  // namespace codes_ops

// nullopt: no type of codes.
inline std::optional<Codes> find_codes(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return Codes::kInt8;
    case at::kFloat8_e4m3fn:
      return Codes::kE4m3;
    case at::kFloat8_e5m2:
      return Codes::kE5m2;
    default:
      return std::nullopt;
  }
}

// What x may be before it is quantised, and D afterwards.
inline bool is_quantizable(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

inline bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Rows of a tensor whose last dimension is a row.
inline c10::SymInt rows_of(const Tensor& tensor) {
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows *= tensor.sym_size(d);
  return rows;
}

inline c10::SymDimVector with_last(const Tensor& tensor, const c10::SymInt& size) {
  c10::SymDimVector sizes(tensor.sym_sizes());
  sizes.back() = size;
  return sizes;
}

// A scale for each of `count` rows, or one number. `name` is "op: argument".
void check_scale(const OptionalTensor& scale, const char* name, const c10::SymInt& count,
                 const Tensor& like);

}  // namespace warpwright
