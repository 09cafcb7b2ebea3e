// Shared by the attention kernels of every path: the mask, the dropout and the causal limits.
#pragma once

#include <cuda_runtime.h>

#include "common/philox.h"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/attention/attention.h"

namespace warpwright {

// The term that the mask adds to the score of query `row` and key `col` (both inside the extents).
template <class T>
__device__ __forceinline__ Accum<T> mask_term(const AttentionParams& p, int64_t b, int64_t h,
                                              int64_t row, int64_t col) {
  const int64_t offset =
      b * p.mask_stride[0] + h * p.mask_stride[1] + row * p.mask_stride[2] + col * p.mask_stride[3];
  switch (p.mask_type) {
    case MaskType::kBool:
      return static_cast<const bool*>(p.mask)[offset] ? Accum<T>(0) : -Accum<T>(INFINITY);
    case MaskType::kFloat32:
      return static_cast<Accum<T>>(static_cast<const float*>(p.mask)[offset]);
    case MaskType::kElement:
      return convert<Accum<T>>(static_cast<const T*>(p.mask)[offset]);
    default:
      return Accum<T>(0);
  }
}

__device__ __forceinline__ DropoutKey load_dropout_key(const AttentionParams& p,
                                                       uint32_t threshold) {
  return DropoutKey(static_cast<uint64_t>(p.philox_state[0]),
                    static_cast<uint64_t>(p.philox_state[1]), threshold);
}

template <class T>
__device__ __forceinline__ T* operand_rows(const AttentionOperand& x, int64_t b, int64_t h,
                                           int64_t row) {
  return static_cast<T*>(x.data) + b * x.stride_b + h * x.stride_h + row * x.stride_s;
}

// How many keys a query before `row_end` can see.
__device__ __forceinline__ int64_t visible_keys(const AttentionParams& p, int64_t row_end) {
  return p.is_causal && row_end < p.S_k ? row_end : p.S_k;
}

}  // namespace warpwright
