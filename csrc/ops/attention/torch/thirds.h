// Query, key and value as the thirds of the rows of one matrix, qkv (..., 3 H D): a projection
// writes all three at once. The gradient of qkv is then written by attention's backward itself.
// Without that, autograd concatenates the three gradients: each is read and written once more.
#pragma once

#include <ATen/core/Tensor.h>

namespace warpwright {

constexpr const char* kSplitQkvNode = "WarpwrightSplitQkvBackward";

// Whether the three, which share a storage, follow each other within each row. `heads`: their
// dimension of heads, whose elements must be dense.
inline bool are_thirds(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       int64_t heads) {
  const int64_t width = q.size(heads) * q.size(-1);
  return q.sizes() == k.sizes() && q.sizes() == v.sizes() && q.strides() == k.strides() &&
         q.strides() == v.strides() && q.stride(-1) == 1 && q.stride(heads) == q.size(-1) &&
         q.is_alias_of(k) && q.is_alias_of(v) && q.numel() != 0 &&
         k.storage_offset() - q.storage_offset() == width &&
         v.storage_offset() - k.storage_offset() == width;
}

}  // namespace warpwright
