// Dense copies of one memory order, for kernels that walk elements without strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

namespace warpwright {

// `tensor` in the memory order of the dense tensor `like`, without a copy if it already is.
inline at::Tensor in_order_of(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.strides() == like.strides()) return tensor;
  return at::empty_like(like, tensor.options()).copy_(tensor);
}

}  // namespace warpwright
