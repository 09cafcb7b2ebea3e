// Shared by the attention kernels of every path: the mask, the dropout and the causal limits.
#pragma once

#include <cuda_runtime.h>

#include "common/philox.h"
#include "device/reduce.cuh"
#include "device/tanh.cuh"
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

// The keys that queries [row, row_end) see, from a multiple of kBlock on. kWindowed: with a window.
template <bool kWindowed, int kBlock>
__device__ __forceinline__ PositionRange key_blocks(const AttentionParams& p, int64_t row,
                                                    int64_t row_end) {
  if constexpr (kWindowed) {
    const PositionRange keys = visible_keys(p, row, row_end);
    return {keys.begin / kBlock * kBlock, keys.end};
  } else {
    return {0, p.is_causal && row_end < p.S_k ? row_end : p.S_k};
  }
}
// The queries that see keys [col, col_end).
template <bool kWindowed, int kBlock>
__device__ __forceinline__ PositionRange query_blocks(const AttentionParams& p, int64_t col,
                                                      int64_t col_end) {
  if constexpr (kWindowed) {
    const PositionRange queries = visible_queries(p, col, col_end);
    return {queries.begin / kBlock * kBlock, queries.end};
  } else {
    return {p.is_causal ? min(col, p.S_q) / kBlock * kBlock : 0, p.S_q};
  }
}

// A probability times the derivative of its capped score, 1 - tanh^2. The tanh comes from the
// probability, 2^(cap * log2(e) * tanh - lse), because no registers are left to keep it. uncap = 1
// / (cap * log2(e)). If the probability is 0, t is infinite or NaN; the factor then is 0.
__device__ __forceinline__ float uncapped(float probability, float lse, float uncap) {
  const float t = (lg2_approx(probability) + lse) * uncap;
  return probability * fmaxf(fmaf(-t, t, 1.f), 0.f);
}

}  // namespace warpwright
