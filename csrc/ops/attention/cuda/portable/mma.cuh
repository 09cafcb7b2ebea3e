// Shared by the tensor-core attention kernels: tiles of rows in swizzled shared memory, fragment
// loads, the score mask. 16-bit operands; head dimensions padded with zeros to kD = 64, 128 or 256.
// Fragments are those of mma.m16n8k16 (device/mma_sm80.cuh): g = lane / 4, t = lane % 4.
#pragma once

#include "device/access.cuh"
#include "device/exp.cuh"
#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "ops/attention/cuda/common.cuh"
#include "ops/attention/cuda/dropout.cuh"
#include "ops/attention/cuda/launch.h"

namespace warpwright {

constexpr int kMmaThreads = 128;  // 4 warps

extern __shared__ uint4 attention_smem[];

// A (rows, kD) tile of 16-bit elements. The 16-byte chunk c of row r is at chunk (c & ~7) | ((c ^
// r) & 7). The 8 rows of one ldmatrix phase are then in 8 different bank groups.
template <int kD>
__device__ __forceinline__ uint32_t tile_address(uint32_t base, int row, int chunk) {
  return base + static_cast<uint32_t>(row * (kD * 2) + (((chunk & ~7) | ((chunk ^ row) & 7)) << 4));
}

// Starts the copy of kRows rows of `cols` elements. Rows past `rows` and columns past `cols` become
// zero. 16-byte rows use cp.async; others go element by element through registers. A thread keeps
// its column, so the next row is one addition to a pointer.
template <int kRows, int kD, class T>
__device__ __forceinline__ void load_tile(T* tile, const T* source, int64_t stride, int64_t rows,
                                          int64_t cols, bool vectorized) {
  constexpr int kChunks = kD / 8;
  constexpr int kStep = kMmaThreads / kChunks;  // rows per pass
  static_assert(kRows % kStep == 0, "whole passes of the CTA");
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int valid = chunk * 8 < cols ? static_cast<int>(min(rows, int64_t(kRows))) : 0;
  const T* from = source + first * stride + chunk * 8;
  if (vectorized) {
    const uint32_t base = smem_address(tile);
#pragma unroll
    for (int pass = 0; pass < kRows / kStep; ++pass) {
      const int row = first + pass * kStep;
      cp_async<16>(tile_address<kD>(base, row, chunk), from, row < valid ? 16 : 0);
      from += kStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int row = first; row < kRows; row += kStep) {
    union {
      T element[8];
      uint4 whole;
    } value = {.whole = make_uint4(0, 0, 0, 0)};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (row < valid && chunk * 8 + i < cols) value.element[i] = from[i];
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + tile_address<kD>(0, row, chunk)) =
        value.whole;
    from += kStep * stride;
  }
}

// tile_address of row `row` + lane_row and chunk 2 * step + half. The compiler knows `row`, a
// multiple of 8, and `step`, so this is one of four lane addresses plus an immediate.
template <int kD>
__device__ __forceinline__ uint32_t fragment_address(uint32_t base, int lane_row, int half, int row,
                                                     int step) {
  const uint32_t lane =
      base +
      static_cast<uint32_t>(lane_row * (kD * 2) + ((((step % 4 * 2) ^ half ^ lane_row) & 7) << 4));
  return lane + static_cast<uint32_t>(row * (kD * 2) + step / 4 * 128);
}

// A operand: rows [row, row + 16), depth [16 * step, 16 * step + 16).
template <int kD>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t base, int row, int step) {
  const int lane = threadIdx.x % kWarpSize;
  ldmatrix_x4(a, fragment_address<kD>(base, lane % 16, lane / 16, row, step));
}

// B operands of columns [row, row + 16). A column is a row of the tile, and depth runs along it:
// b[0..1] for the first 8 columns, b[2..3] for the second.
template <int kD>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t base, int row, int step) {
  const int lane = threadIdx.x % kWarpSize;
  ldmatrix_x4(b, fragment_address<kD>(base, lane % 8 + lane / 16 * 8, lane / 8 % 2, row, step));
}

// B operands of columns [16 * pair, 16 * pair + 16). Depth runs down the rows [row, row + 16) of
// the tile.
template <int kD>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], uint32_t base, int row, int pair) {
  const int lane = threadIdx.x % kWarpSize;
  ldmatrix_x4_trans(b, fragment_address<kD>(base, lane % 16, lane / 16, row, pair));
}

template <class T>
__device__ __forceinline__ void mma_pair(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  mma_m16n8k16(d0, a, {b[0], b[1]}, T());
  mma_m16n8k16(d1, a, {b[2], b[3]}, T());
}

// acc (16 kTiles rows, 8 kCols columns) += rows of x times rows of y, depth kD. The fragments of
// the next products are loaded before the current products.
template <class T, int kD, int kTiles, int kCols>
__device__ __forceinline__ void multiply_rows(float (&acc)[kTiles][kCols][4], uint32_t x, int x_row,
                                              uint32_t y) {
  constexpr int kPairs = kCols / 2, kSteps = kD / 16;
  const uint32_t x_rows = x + x_row * (kD * 2);
  uint32_t a[2][kTiles][4], b[2][4];
  auto load_step = [&](int step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) load_a<kD>(a[step % 2][i], x_rows, 16 * i, step);
  };
  load_step(0);
  load_b<kD>(b[0], y, 0, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int next = step * kPairs + pair + 1;
      if (pair == kPairs - 1 && step + 1 < kSteps) load_step(step + 1);
      if (next < kSteps * kPairs) load_b<kD>(b[next % 2], y, next % kPairs * 16, next / kPairs);
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        mma_pair<T>(acc[i][2 * pair], acc[i][2 * pair + 1], a[step % 2][i], b[(next - 1) % 2]);
    }
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float x, float y) {
  union {
    T element[2];
    uint32_t word;
  } pair = {.element = {convert<T>(x), convert<T>(y)}};
  return pair.word;
}

// acc (16 kTiles rows, kD columns) += w x. w (16 kTiles, 8 kDepth) is an accumulator, x a tile of 8
// kDepth rows. The accumulator fragments of two n-tiles are the A fragment of one k-step.
template <class T, int kD, int kTiles, int kDepth>
__device__ __forceinline__ void multiply_weighted(float (&acc)[kTiles][kD / 8][4],
                                                  const float (&w)[kTiles][kDepth][4], uint32_t x) {
  constexpr int kPairs = kD / 16, kSteps = kDepth / 2;
  uint32_t b[2][4];
  load_b_trans<kD>(b[0], x, 0, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float(&lo)[4] = w[i][2 * step], (&hi)[4] = w[i][2 * step + 1];
      a[i][0] = pack_pair<T>(lo[0], lo[1]);
      a[i][1] = pack_pair<T>(lo[2], lo[3]);
      a[i][2] = pack_pair<T>(hi[0], hi[1]);
      a[i][3] = pack_pair<T>(hi[2], hi[3]);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int next = step * kPairs + pair + 1;
      if (next < kSteps * kPairs)
        load_b_trans<kD>(b[next % 2], x, next / kPairs * 16, next % kPairs);
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        mma_pair<T>(acc[i][2 * pair], acc[i][2 * pair + 1], a[i], b[(next - 1) % 2]);
    }
  }
}

template <int kTiles, int kCols>
__device__ __forceinline__ void clear(float (&acc)[kTiles][kCols][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kCols; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][n][e] = 0.f;
}

// The row and column of a thread's acc[i][n][e], relative to the tile's first row (of this warp)
// and column.
__device__ __forceinline__ int fragment_row(int i, int e) {
  return 16 * i + threadIdx.x % kWarpSize / 4 + e / 2 * 8;
}
__device__ __forceinline__ int fragment_col(int n, int e) {
  return 8 * n + threadIdx.x % 4 * 2 + e % 2;
}

// Turns raw products into scores in units of log2: multiplies by scale * log2(e), applies the
// softcap and adds the mask.
// Rows are queries, or keys if kTransposed. Nothing is read outside the extents.
template <class T, bool kTransposed, int kTiles, int kCols>
__device__ __forceinline__ void add_mask(const AttentionParams& p, float (&s)[kTiles][kCols][4],
                                         int64_t b, int64_t h, int64_t row0, int64_t col0,
                                         float scale_log2) {
  const float cap = static_cast<float>(p.softcap), cap_log2 = cap * kLog2E;
  const float inverse_cap = 2.f / cap;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kCols; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = row0 + fragment_row(i, e), col = col0 + fragment_col(n, e);
        const int64_t query = kTransposed ? col : row, key = kTransposed ? row : col;
        s[i][n][e] *= scale_log2;
        if (cap > 0.f) s[i][n][e] = cap_log2 * tanh_from_log2(s[i][n][e] * inverse_cap);
        if (p.mask_type != MaskType::kNone && query < p.S_q && key < p.S_k)
          s[i][n][e] += mask_term<T>(p, b, h, query, key) * kLog2E;
      }
}

// Sets -inf if the key is outside or hidden by the causal rule or, if kWindowed, by the window.
// Positions count from the fragment's corner, so that 32 bits hold them.
template <bool kTransposed, bool kWindowed, int kTiles, int kCols>
__device__ __forceinline__ void hide(const AttentionParams& p, float (&s)[kTiles][kCols][4],
                                     int64_t row0, int64_t col0) {
  constexpr int64_t kFar = 1 << 20;  // past every tile
  const int64_t query0 = kTransposed ? col0 : row0, key0 = kTransposed ? row0 : col0;
  const int last = static_cast<int>(min(p.S_k - key0, kFar)) - 1;
  const int64_t seen = kWindowed ? last_seen(p) : p.is_causal ? 0 : kUnlimited;
  auto near = [](int64_t x) { return static_cast<int>(max(-kFar, min(x, kFar))); };
  const int diagonal = near(query0 - key0 + seen);
  const int first = kWindowed ? near(query0 - key0 - p.window_left) : 0;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kCols; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = fragment_row(i, e), col = fragment_col(n, e);
        const int query = kTransposed ? col : row, key = kTransposed ? row : col;
        if (key > min(last, query + diagonal) || (kWindowed && key < query + first))
          s[i][n][e] = -INFINITY;
      }
}

// Stores rows [0, rows) and columns [0, cols) of an accumulator, scaled. `target` is the warp's
// row.
template <class T, int kTiles, int kCols>
__device__ __forceinline__ void store_rows(const float (&acc)[kTiles][kCols][4], T* target,
                                           int64_t stride, int64_t rows, int64_t cols,
                                           const float (&scale)[kTiles][2], bool pair_stores) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(i, 2 * half);
      if (row >= rows) continue;
      T* to = target + row * stride;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        const int col = fragment_col(n, 0);
        const float x = acc[i][n][2 * half] * scale[i][half];
        const float y = acc[i][n][2 * half + 1] * scale[i][half];
        if (pair_stores) {
          if (col < cols) store_pair_global(to + col, pack_pair<T>(x, y));
        } else {
          if (col < cols) to[col] = convert<T>(x);
          if (col + 1 < cols) to[col + 1] = convert<T>(y);
        }
      }
    }
}

}  // namespace warpwright
