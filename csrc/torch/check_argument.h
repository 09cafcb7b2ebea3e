// Checks that every key of an op makes of a tensor argument, symbolic sizes included. The library's
// own calls pass saved results here, but a call of the raw op may pass anything.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "torch/checks.h"

namespace warpwright {

// Sizes, type and device of an argument. `name` is "op: argument".
inline void check_argument(const at::Tensor& tensor, const char* name, c10::SymIntArrayRef sizes,
                           at::ScalarType dtype, const at::Tensor& like) {
  TORCH_CHECK(tensor.sym_sizes() == sizes, name, ": expected shape ", sizes, ", got ",
              tensor.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == dtype, name, ": expected ", dtype, ", got ",
              tensor.scalar_type());
  check_same_device(tensor, like, name);
}

// For an argument whose elements are read consecutively.
inline void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
              tensor.sym_strides());
}

// check_has_storage() for code above the dispatcher that calls ATen's ops first, which do not
// check. Tensors without memory of their own there (subclasses, batched, functional, meta) are
// checked further down.
inline void check_plain_storage(const at::Tensor& tensor, const char* name) {
  if (!tensor.defined() || tensor.is_meta() || at::isTensorSubclassLike(tensor)) return;
  if (tensor.layout() == at::kStrided && tensor.has_storage()) check_has_storage(tensor, name);
}

}  // namespace warpwright
