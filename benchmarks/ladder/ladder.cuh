// What the rungs share: the product, what a rung says about itself, and the way out of a tensor
// core's registers. entry.cpp calls launch_rung(); each rung's file defines it and kRung.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "host/launch.h"

namespace ladder {

using bf16 = __nv_bfloat16;

// D = A B^T in bf16 with fp32 sums, all row-major and dense: linear's forward without a bias.
struct Gemm {
  const bf16* a;  // (m, k)
  const bf16* b;  // (n, k)
  bf16* d;        // (m, n)
  int m;
  int n;
  int k;
  cudaStream_t stream;
};

// A rung takes whole tiles only: m, n and k are multiples of these.
struct Rung {
  int blk_m;
  int blk_n;
  int blk_k;
  int stages;      // of the ring in shared memory; 0: there is none
  int threads;     // of a block
  int smem_bytes;  // of a block, static and dynamic
};

extern const Rung kRung;
void launch_rung(const Gemm& g);

// The grid of a kernel that gives every tile of D a block of its own.
inline dim3 one_block_a_tile(const Gemm& g) {
  return dim3(static_cast<unsigned>(g.m / kRung.blk_m) * static_cast<unsigned>(g.n / kRung.blk_n));
}

// Tensor cores leave four sums in a thread: v[0], v[1] are neighbours in row `row`, v[2], v[3] in
// row + 8. Four lanes hold eight columns, so that a warp writes 16 bytes of each of eight rows.
__device__ __forceinline__ void store_fragment(const Gemm& g, const float* v, int row, int col) {
  bf16* d = g.d + int64_t{row} * g.n + col;
  *reinterpret_cast<__nv_bfloat162*>(d) = __floats2bfloat162_rn(v[0], v[1]);
  *reinterpret_cast<__nv_bfloat162*>(d + int64_t{8} * g.n) = __floats2bfloat162_rn(v[2], v[3]);
}

}  // namespace ladder
