// The last kernel of the fused backward: dq = scale * sums of dQ, rounded.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/arch.cuh"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/sm90/tile.cuh"

namespace warpwright {

// Transposes 4 x 4 words over the four lanes of a quad: words[j] becomes lane j's words[lane].
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = lane & bit;
      const uint32_t other = __shfl_xor_sync(kFullMask, upper ? words[i] : words[i + bit], bit);
      (upper ? words[i] : words[i + bit]) = other;
    }
}

// sums: as backward_fused.cuh describes them; dq (B, H, S_q, D), rows at multiples of 16 bytes. A
// CTA of 256 threads per block of queries; grid.x = B * H * query_blocks.
template <class T, class Tile>
__global__ void __launch_bounds__(256)
    attention_dq_rows_sm90_kernel(const float* sums, AttentionOperand dq, int H, int query_blocks,
                                  int S_q, int D, float scale) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x) % query_blocks;
  const int bh = static_cast<int>(blockIdx.x) / query_blocks, b = bh / H, h = bh % H;
  const float4* from = reinterpret_cast<const float4*>(sums + (int64_t{bh} * query_blocks + block) *
                                                                  (Tile::kSumBytes / 4));
  const int half = static_cast<int>(threadIdx.x / 128), thread = threadIdx.x % 128;
  const int quad_lane = thread % 4;
  const int row = block * Tile::kBlockM + (Tile::kSplitsColumns ? 0 : half * 64) +
                  thread / 32 * 16 + thread % 32 / 4;
  T* out = static_cast<T*>(dq.data) + b * dq.stride_b + h * dq.stride_h;
  // Of rows `row` and `row` + 8: columns 8 (4 part + i) + 2 quad_lane and the next.
  uint32_t words[2][2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 x = from[(half * 8 + i) * 128 + thread];
    words[0][i / 4][i % 4] = pack_nearest(x.x * scale, x.y * scale, T());
    words[1][i / 4][i % 4] = pack_nearest(x.z * scale, x.w * scale, T());
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t(&w)[4] = words[r][part];  // after the exchange 8 neighbouring columns
      transpose_in_quad(w, quad_lane);
      const int col = (Tile::kSplitsColumns ? half * 64 : 0) + (part * 4 + quad_lane) * 8;
      if (row + 8 * r < S_q && col < D)
        *reinterpret_cast<uint4*>(out + (row + 8 * r) * dq.stride_s + col) =
            make_uint4(w[0], w[1], w[2], w[3]);
    }
}

}  // namespace warpwright
