// The work of a thread in rungs 4 and 5: 8 x 8 elements of a block's 128 x 128, as outer products
// of 8 values of A and 8 of B that lie in shared memory as floats, k by k.
#pragma once

#include "ladder.cuh"

namespace ladder {

constexpr int kTileThreads = 256;  // 16 x 16

struct ThreadTile {
  float sum[8][8] = {};

  // Rows 4 y .. + 3 and 64 + 4 y .. + 3, columns 4 x .. + 3 and 64 + 4 x .. + 3: 8 lanes side by
  // side then read 128 bytes side by side, which no two of them have in the same bank.
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 16 * 4; }
  __device__ __forceinline__ static int first_col() { return threadIdx.x % 16 * 4; }

  // a, b: the 128 values of one k, at multiples of 16 bytes. 16 reads for 64 multiplications.
  __device__ __forceinline__ void multiply(const float* a, const float* b) {
    const float4 a0 = *reinterpret_cast<const float4*>(a + first_row());
    const float4 a1 = *reinterpret_cast<const float4*>(a + first_row() + 64);
    const float4 b0 = *reinterpret_cast<const float4*>(b + first_col());
    const float4 b1 = *reinterpret_cast<const float4*>(b + first_col() + 64);
    const float rA[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
    const float rB[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[i][j] += rA[i] * rB[j];
    }
  }

  // tile_row, tile_col: of the block's first element.
  __device__ __forceinline__ void store(const Gemm& g, int tile_row, int tile_col) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = tile_row + first_row() + i / 4 * 64 + i % 4;
      bf16* d = g.d + int64_t{row} * g.n + tile_col + first_col();
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum[i][j], sum[i][j + 1]),
                                         __floats2bfloat162_rn(sum[i][j + 2], sum[i][j + 3])};
        *reinterpret_cast<uint2*>(d + j / 4 * 64) = *reinterpret_cast<const uint2*>(pairs);
      }
    }
  }
};

}  // namespace ladder
