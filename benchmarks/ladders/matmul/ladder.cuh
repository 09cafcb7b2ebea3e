// What the rungs share: the product, what a rung says about itself, and the way out of a tensor
// core's registers. entry.cu calls launch_rung(); each rung's file defines it and kRung.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"
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

inline std::string describe(const Rung& r) {
  return said("blk_m", r.blk_m) + said("blk_n", r.blk_n) + said("blk_k", r.blk_k) +
         said("stages", r.stages) + said("threads", r.threads) + said("smem_bytes", r.smem_bytes);
}

// tensors: a, b, d. extents: m, n, k.
inline Gemm problem_of(void* const* tensors, const int64_t* extents, cudaStream_t stream) {
  const int64_t m = extents[0], n = extents[1], k = extents[2];
  check_extent("m", m, kRung.blk_m);
  check_extent("n", n, kRung.blk_n);
  check_extent("k", k, kRung.blk_k);
  check_pointer("a", tensors[0]);
  check_pointer("b", tensors[1]);
  check_pointer("d", tensors[2]);
  if ((m / kRung.blk_m) * (n / kRung.blk_n) > warpwright::kMaxGridX) {
    throw std::invalid_argument("m x n: more than 2^31 tiles");
  }
  return {static_cast<const bf16*>(tensors[0]),
          static_cast<const bf16*>(tensors[1]),
          static_cast<bf16*>(tensors[2]),
          static_cast<int>(m),
          static_cast<int>(n),
          static_cast<int>(k),
          stream};
}

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
