// Checks that the CPU and CUDA kernels of every op make of a tensor argument before they take its
// address.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace warpwright {

// Throws if the elements of `tensor` are not in memory. at::Tensor::const_data_ptr() without a type
// then returns null, and a storage that was resized smaller leaves the sizes unchanged. `name` is
// "op: argument". Undefined tensors pass.
inline void check_has_storage(const at::Tensor& tensor, const char* name) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  TORCH_CHECK(tensor.unsafeGetTensorImpl()->storage_initialized(), name,
              ": the tensor has a non-zero number of elements, but its data is not allocated yet");
  int64_t elements = tensor.storage_offset() + 1;  // up to the last one that the strides reach
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const size_t expected = static_cast<size_t>(elements) * tensor.itemsize();
  const size_t got = tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  TORCH_CHECK(expected <= got, name, ": expected a storage of at least ", expected,
              " bytes for sizes ", tensor.sizes(), ", strides ", tensor.strides(), " and offset ",
              tensor.storage_offset(), ", got one of ", got, " bytes: its data is not allocated");
}

// Throws unless both tensors are on one device. Undefined tensors pass.
inline void check_same_device(const at::Tensor& tensor, const at::Tensor& like, const char* name) {
  if (!tensor.defined()) return;
  TORCH_CHECK(tensor.device() == like.device(), name, ": expected device ", like.device(), ", got ",
              tensor.device());
}

// Throws unless `dtype` is one of torch's. The dispatcher casts a caller's number unchecked, and
// ATen's conversions index tables by it. `name` is "op: argument".
inline void check_is_dtype(at::ScalarType dtype, const char* name) {
  const auto number = static_cast<int>(dtype);
  TORCH_CHECK(number >= 0 && number < static_cast<int>(at::ScalarType::Undefined), name,
              ": expected a dtype, got the number ", number);
}

}  // namespace warpwright
