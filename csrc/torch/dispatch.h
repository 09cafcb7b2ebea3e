// Dispatcher handles, and the facts that a CPU or CUDA kernel needs about a tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>

#include "common/dtype.h"

namespace warpwright {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A typed handle of "warpwright::<name>"; look it up once, in a function-local static.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// nullopt: a type that no kernel of ours takes (complex, bool, ...).
inline std::optional<DType> find_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    default:
      return std::nullopt;
  }
}

inline DType dtype_of(const Tensor& tensor) {
  const auto dtype = find_dtype(tensor.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(dtype.has_value(), "warpwright: no kernel for ",
                              tensor.scalar_type());
  return *dtype;
}

inline bool is_16bit(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

inline bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

}  // namespace warpwright
