// Shared by attention's kernels for sm_90a: products of tiles, the online softmax, and rows of an
// accumulator to memory. Operands have 16 bits. The fp32 accumulators of a warpgroup (64 rows) are
// in wgmma's order: d[4i + e] is row 16 w + g + 8 (e / 2), column 8i + 2t + e % 2, for warp w of
// the group, g = lane / 4, t = lane % 4.
//
// A tile of rows in shared memory has the layout that TMA writes: chunks of 64 columns, each chunk
// kRows rows of 128 bytes with 128-byte swizzle, at a multiple of 1024. As an operand it is K-major
// if the product runs over its columns (Q K^T), MN-major if it runs over its rows (P V).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/exp.cuh"
#include "device/math.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/types.cuh"

namespace warpwright {

// ---- products ----

// The descriptor of a tile of kRows rows, or of its rows from `shared` on.
template <int kRows>
__device__ __forceinline__ uint64_t row_tile(uint32_t shared) {
  return wgmma_descriptor(wgmma_descriptor_fields(/*leading=*/kRows * 128, /*stride=*/1024),
                          shared);
}

// d (64, N) = x y^T over kDepth columns; x: 64 rows of a tile of kRowsX, y: a tile of N = kRowsY.
template <class T, int kDepth, int kRowsX, int kRowsY, int kRegs>
__device__ __forceinline__ void multiply_rows_sm90(float (&d)[kRegs], uint64_t x, uint64_t y) {
  static_assert(kRegs * 2 == kRowsY);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    const int chunk = step / 4, in_chunk = step % 4 * 32;
    wgmma<T, 0, 0>(d, x + ((chunk * kRowsX * 128 + in_chunk) >> 4),
                   y + ((chunk * kRowsY * 128 + in_chunk) >> 4), step > 0);
  }
}

// The A operand of 64 rows by 16 kSteps columns, in registers.
template <int kSteps>
using RegisterOperand = uint32_t[kSteps][4];

// d (64, N) (+)= a y: y has 16 kSteps rows and N columns.
template <class T, int kSteps, int kRegs>
__device__ __forceinline__ void multiply_held(float (&d)[kRegs], const RegisterOperand<kSteps>& a,
                                              uint64_t y, bool accumulate) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_registers<T, 1>(d, a[step], y + ((step * 2048) >> 4), accumulate || step > 0);
  }
}

// An accumulator as the A operand of the next product.
template <class T, int kRegs>
__device__ __forceinline__ void round_to_operand(RegisterOperand<kRegs / 8>& a,
                                                 const float (&d)[kRegs]) {
#pragma unroll
  for (int step = 0; step < kRegs / 8; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[step][i] = pack_nearest(d[8 * step + 2 * i], d[8 * step + 2 * i + 1], T());
}

template <int kRegs>
__device__ __forceinline__ void clear_accumulator(float (&d)[kRegs]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) d[i] = 0.f;
}

// ---- softmax ----

// The running maximum and sum of this thread's two rows: g and g + 8 of the warp's 16. `sum` is
// partial, over this thread's columns.
struct OnlineSoftmax {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};

  // Scores to probabilities 2^(scale * (s - base)). The base cancels in the end, so any base near
  // the maximum serves. It moves only if a probability would exceed 2^kHeadroom, which happens in
  // few blocks; fp16 holds 2^15. If it returns true, the output so far must be multiplied by
  // `correction`.
  template <int kRegs>
  __device__ __forceinline__ bool step(float (&s)[kRegs], float scale, float (&correction)[2]) {
    constexpr float kHeadroom = 6.f;
    float block_max[2] = {max[0], max[1]};
#pragma unroll
    for (int i = 0; i < kRegs; i += 4)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        block_max[half] = fmaxf(block_max[half], fmaxf(s[i + 2 * half], s[i + 2 * half + 1]));
    bool moves = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The four lanes of a row. A NaN score is ignored here and makes the sum below NaN.
      block_max[half] = fmaxf(block_max[half], __shfl_xor_sync(kFullMask, block_max[half], 1));
      block_max[half] = fmaxf(block_max[half], __shfl_xor_sync(kFullMask, block_max[half], 2));
      // Any base replaces -inf. With nothing visible yet, -inf - -inf is NaN, which compares false.
      moves |= (block_max[half] - max[half]) * scale > kHeadroom;
    }
    moves = __any_sync(kFullMask, moves);
    if (moves) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = block_max[half] == -INFINITY ? 0.f : block_max[half] * scale;
        correction[half] = ex2_approx(max[half] * scale - base);
        max[half] = block_max[half];
        sum[half] *= correction[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row with nothing visible yet: 2^(-inf - 0) = 0; -inf - -inf would be NaN.
      const float base = max[half] == -INFINITY ? 0.f : max[half] * scale;
#pragma unroll
      for (int i = 2 * half; i < kRegs; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[i + e] = ex2_approx(fmaf(s[i + e], scale, -base));
          sum[half] += s[i + e];
        }
    }
    return moves;
  }
};

template <int kRegs>
__device__ __forceinline__ void scale_rows(float (&d)[kRegs], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) d[i] *= factor[i / 2 % 2];
}

// Rows whose factor is 0 become 0, even if they hold infinities or NaN.
template <int kRegs>
__device__ __forceinline__ void clear_hidden_rows(float (&d)[kRegs], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i)
    if (factor[i / 2 % 2] == 0.f) d[i] = 0.f;
}

// Hides columns past a limit. `limit[half]` is the last visible column of the thread's two rows,
// counted from the tile's first.
template <int kRegs>
__device__ __forceinline__ void hide_columns(float (&s)[kRegs], const int (&limit)[2]) {
  const int first[2] = {limit[0] - accumulator_col(), limit[1] - accumulator_col()};
#pragma unroll
  for (int i = 0; i < kRegs; ++i)
    if (i / 4 * 8 + i % 2 > first[i / 2 % 2]) s[i] = -INFINITY;
}

// Hides keys past p.S_k and, under the causal rule, keys past the query. The warpgroup's 64 queries
// begin at row0, the keys at col0.
template <class Params, int kRegs>
__device__ __forceinline__ void hide_ends(float (&s)[kRegs], int row0, int col0, const Params& p) {
  constexpr int kKeys = kRegs * 2;
  if (col0 + kKeys <= p.S_k && !(p.is_causal && col0 + kKeys - 1 > row0 + accumulator_warp_row()))
    return;
  const int row = row0 + accumulator_row() - col0, last = p.S_k - 1 - col0;
  const int limit[2] = {p.is_causal ? min(row, last) : last,
                        p.is_causal ? min(row + 8, last) : last};
  hide_columns(s, limit);
}

// Statistics of a transposed tile's queries are a row of fp32 in shared memory, one per column.

// The values for the two columns of accumulator block i / 4.
__device__ __forceinline__ float2 load_pair(uint32_t row, int i) {
  const uint2 pair = load_shared_u64(row + (i / 4 * 8 + accumulator_col()) * 4);
  return {__uint_as_float(pair.x), __uint_as_float(pair.y)};
}

// Transposed scores to probabilities 2^(scale * s - lse).
template <int kRegs>
__device__ __forceinline__ void exponentiate_columns(float (&s)[kRegs], float scale, uint32_t lse) {
#pragma unroll
  for (int i = 0; i < kRegs; i += 4) {
    const float2 of = load_pair(lse, i);
    s[i] = ex2_approx(fmaf(s[i], scale, -of.x));
    s[i + 1] = ex2_approx(fmaf(s[i + 1], scale, -of.y));
    s[i + 2] = ex2_approx(fmaf(s[i + 2], scale, -of.x));
    s[i + 3] = ex2_approx(fmaf(s[i + 3], scale, -of.y));
  }
}

// ---- from and to memory ----

// Loads kRows rows of kChunks chunks by TMA, from row0 of head (b, h).
template <int kChunks, int kRows>
__device__ __forceinline__ void load_row_tile(uint32_t to, const CUtensorMap* map, int row0, int h,
                                              int b, uint32_t barrier) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    tma_load_4d(to + chunk * kRows * 128, map, chunk * 64, row0, h, b, barrier);
}

// Stores 64 rows of a tile of kRows in the thread's open group, if they begin inside the extents
// (S, D). Their columns begin with chunk `first`.
template <int kChunks, int kRows>
__device__ __forceinline__ void store_row_tile(const CUtensorMap* map, uint32_t from, int row0,
                                               int S, int D, int h, int b, int first = 0) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    if ((first + chunk) * 64 < D && row0 < S)
      tma_store_4d(map, (first + chunk) * 64, row0, h, b, from + chunk * kRows * 128);
}

// Writes a warpgroup's 64 rows of kChunks chunks (0: all of d) to shared memory, in the layout
// above. The columns begin with chunk `first` of d. `shared` is the first chunk's first row, kRows
// the rows of the whole tile. TMA may store them after fence_proxy_async() and a barrier.
template <class T, int kRows, int kChunks = 0, int kRegs>
__device__ __forceinline__ void write_row_tile(uint32_t shared, const float (&d)[kRegs],
                                               int first = 0) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // The lane's row and 16-byte column among the four 8x8 matrices of one stmatrix: rows 0-7 and
  // 8-15 of the left 8 columns, then of the right. The next stmatrix is 32 bytes further.
  const int row = accumulator_warp_row() + lane % 16;
  const uint32_t address = shared + row * 128 + (((lane / 16) ^ row % 8) << 4);
#pragma unroll
  for (int chunk = 0; chunk < (kChunks > 0 ? kChunks : kRegs / 32); ++chunk)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* from = &d[(first + chunk) * 32 + j * 8];
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack_nearest(from[2 * i], from[2 * i + 1], T());
      stmatrix_x4((address + chunk * kRows * 128) ^ (j * 32), words);
    }
}

}  // namespace warpwright
