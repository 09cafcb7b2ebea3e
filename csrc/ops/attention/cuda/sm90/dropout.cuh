// Dropout in the accumulators of the sm_90a kernels.
#pragma once

#include "device/pack.cuh"
#include "ops/attention/cuda/dropout.cuh"
#include "ops/attention/cuda/sm90/params.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"

namespace warpwright {

// Loads the key from a kernel's parameters; without dropout, one that nothing uses.
template <class Tile, class Params>
__device__ __forceinline__ DropoutKey dropout_key(const Params& p) {
  if constexpr (Tile::kDropout) {
    const uint64_t seed = static_cast<uint64_t>(p.dropout.philox_state[0]);
    const uint64_t offset = static_cast<uint64_t>(p.dropout.philox_state[1]);
    DropoutKey key(seed, offset, p.dropout.threshold);
    // From one lane, so that the compiler keeps the rounds' keys in uniform registers.
    key.key0 = __shfl_sync(kFullMask, key.key0, 0);
    key.key1 = __shfl_sync(kFullMask, key.key1, 0);
    key.offset = __shfl_sync(kFullMask, key.offset, 0);
    return key;
  } else {
    return DropoutKey(0, 0, 0);
  }
}

// The factor that dq and dk still need.
template <class Tile, class Params>
__device__ __forceinline__ float gradient_scale(const Params& p) {
  if constexpr (Tile::kDropout)
    return p.scale * p.dropout.keep_scale;
  else
    return p.scale;
}

// Calls f(i, keeps) for each element i of a consumer's accumulator. row0 and col0: the warp's first
// row and the first column. kTransposed: rows are keys.
template <bool kTransposed, int kRegs, class F>
__device__ __forceinline__ void for_decisions(const DropoutKey& key, int head, int row0, int col0,
                                              F&& f) {
#pragma unroll
  for (int pair = 0; pair < kRegs / 8; ++pair) {
    uint32_t words[4];
    draw_square<kTransposed>(words, key, head, row0, col0 + 16 * pair);
#pragma unroll
    for (int i = 0; i < 8; ++i) f(8 * pair + i, key.keeps(words[i / 2], i % 2));
  }
}

// Clears the dropped probabilities.
template <int kRegs>
__device__ __forceinline__ void clear_dropped(float (&d)[kRegs], const DropoutKey& key, int head,
                                              int row0, int col0) {
  for_decisions<false, kRegs>(key, head, row0, col0,
                              [&](int i, bool keeps) { d[i] = keeps ? d[i] : 0.f; });
}

// Gives the dropped probabilities a negative sign. The gradient of the scores needs P of all, and
// the next two functions the decisions.
template <bool kTransposed, int kRegs>
__device__ __forceinline__ void negate_dropped(float (&d)[kRegs], const DropoutKey& key, int head,
                                               int row0, int col0) {
  for_decisions<kTransposed, kRegs>(key, head, row0, col0,
                                    [&](int i, bool keeps) { d[i] = keeps ? d[i] : -d[i]; });
}

// The kept elements as the A operand of the next product; the others are 0.
template <class T, int kRegs>
__device__ __forceinline__ void round_kept(RegisterOperand<kRegs / 8>& a, const float (&d)[kRegs]) {
#pragma unroll
  for (int i = 0; i < kRegs; i += 2) a[i / 8][i % 8 / 2] = pack_positive(d[i], d[i + 1], T());
}

// dS / keep_scale of one element: P (Z dP - delta / keep_scale), where Z is 1 if it is kept, else
// 0.
__device__ __forceinline__ float dropped_score_gradient(float p, float dp, float scaled_delta) {
  return fmaf(fmaxf(p, 0.f), dp, -fabsf(p) * scaled_delta);
}

}  // namespace warpwright
