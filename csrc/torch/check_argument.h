// What every key of an op checks of a tensor argument, sizes that are symbols included: a call of
// the raw op may pass anything where the library's own calls pass a saved result.
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

// For an argument whose elements are read one after the other.
inline void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
              tensor.sym_strides());
}

// check_has_storage() above the dispatcher, where ATen's ops, which do not check, come first. What
// has no memory of its own there (subclasses, batched, functional, meta) is checked further down.
inline void check_plain_storage(const at::Tensor& tensor, const char* name) {
  if (!tensor.defined() || tensor.is_meta() || at::isTensorSubclassLike(tensor)) return;
  if (tensor.layout() == at::kStrided && tensor.has_storage()) check_has_storage(tensor, name);
}

}  // namespace warpwright
