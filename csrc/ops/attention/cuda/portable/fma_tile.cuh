// Flash attention on FMA units, for fp32, fp64 and head dimensions too large for the tensor-core
// tiles. A CTA has 16 x 16 threads. Thread (ty, tx) owns rows ty + 16 i and columns tx + 16 j of
// each tile. Slices of 16 walk the depth. If an output is wider than 64 columns, several CTAs share
// it, and each recomputes the scores.
#pragma once

#include <algorithm>

#include "device/math.cuh"
#include "ops/attention/cuda/common.cuh"
#include "ops/attention/cuda/launch.h"
#include "ops/attention/cuda/sequence_tiles.h"

namespace warpwright {

template <class T>
struct FmaTile {
  using Acc = Accum<T>;
  static constexpr int kSide = sizeof(Acc) == 8 ? 32 : 64;  // queries, and keys, per tile
  static constexpr int kPer = kSide / 16;                   // rows, and columns, per thread
  static constexpr int kDepth = 16;
  static constexpr int kOut = 64;  // output columns per CTA
  static constexpr int kOutPer = kOut / 16;
  static constexpr int kThreads = 256;
  // Shared memory, in Acc: two depth slices, P, dS, one slice of the right operand. Odd pitches
  // spread a column over the banks.
  static constexpr int kSlicePitch = kDepth + 1;
  static constexpr int kScorePitch = kSide + 1;
  static constexpr int kOutPitch = kOut + 1;
  static constexpr int kSlice = kSide * kSlicePitch;
  static constexpr int kScores = kSide * kScorePitch;
  static constexpr int kSmem = (2 * kSlice + 2 * kScores + kDepth * kOutPitch) * sizeof(Acc);
};

template <class T>
struct FmaShared {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  Acc *slice_x, *slice_y, *p, *ds, *right;

  __device__ explicit FmaShared(void* memory) {
    slice_x = static_cast<Acc*>(memory);
    slice_y = slice_x + Tile::kSlice;
    p = slice_y + Tile::kSlice;
    ds = p + Tile::kScores;
    right = ds + Tile::kScores;
  }
};

extern __shared__ uint4 attention_smem[];

// A tile of packed sequences, of one head of its section.
struct PackedTileOfHead {
  bool exists;
  SequenceTile tile;
  int64_t h;

  __device__ PackedTileOfHead(const SequenceTileList& list, int64_t number)
      : exists(number < *list.num_tiles) {
    if (!exists) return;
    tile = list.tiles[number / list.plan.section];
    h = tile.head + number % list.plan.section;
  }
  __device__ int64_t q_begin() const { return tile.q_end - tile.S_q; }
  __device__ int64_t k_begin() const { return tile.k_end - tile.S_k; }
  __device__ AttentionParams params(const AttentionParams& p) const {
    return sequence_params(p, q_begin(), tile.q_end, k_begin(), tile.k_end);
  }
};

template <class T>
using FmaScores = Accum<T>[FmaTile<T>::kPer][FmaTile<T>::kPer];
template <class T>
using FmaOut = Accum<T>[FmaTile<T>::kPer][FmaTile<T>::kOutPer];

__device__ __forceinline__ float exp_accum(float x) { return expf(x); }
__device__ __forceinline__ double exp_accum(double x) { return exp(x); }
__device__ __forceinline__ float log_accum(float x) { return logf(x); }
__device__ __forceinline__ double log_accum(double x) { return log(x); }

// acc += the product over one slice of the depth.
template <int kDepth, int kRows, int kCols, class Acc, class LoadA, class LoadB>
__device__ __forceinline__ void fma_slice(Acc (&acc)[kRows][kCols], LoadA&& load_a,
                                          LoadB&& load_b) {
#pragma unroll 4
  for (int k = 0; k < kDepth; ++k) {
    Acc a[kRows], b[kCols];
#pragma unroll
    for (int i = 0; i < kRows; ++i) a[i] = load_a(i, k);
#pragma unroll
    for (int j = 0; j < kCols; ++j) b[j] = load_b(j, k);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kCols; ++j) acc[i][j] += a[i] * b[j];
  }
}

// acc = x (x_rows, depth) y (y_rows, depth)^T. Rows past the extents count as zero.
template <class T>
__device__ void fma_row_products(FmaScores<T>& acc, const T* x, int64_t x_stride, int x_rows,
                                 const T* y, int64_t y_stride, int y_rows, int64_t depth,
                                 const FmaShared<T>& shared) {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) acc[i][j] = 0;
  for (int64_t d = 0; d < depth; d += Tile::kDepth) {
    __syncthreads();
    for (int e = threadIdx.x; e < Tile::kSide * Tile::kDepth; e += Tile::kThreads) {
      const int r = e / Tile::kDepth, c = e % Tile::kDepth;
      const bool inside = d + c < depth;
      shared.slice_x[r * Tile::kSlicePitch + c] =
          inside && r < x_rows ? convert<Acc>(x[r * x_stride + d + c]) : Acc(0);
      shared.slice_y[r * Tile::kSlicePitch + c] =
          inside && r < y_rows ? convert<Acc>(y[r * y_stride + d + c]) : Acc(0);
    }
    __syncthreads();
    // Each slice is summed separately first. One long chain of additions would lose digits, and the
    // softmax turns the scores' absolute error into a relative one.
    FmaScores<T> sum = {};
    fma_slice<Tile::kDepth>(
        sum, [&](int i, int k) { return shared.slice_x[(ty + 16 * i) * Tile::kSlicePitch + k]; },
        [&](int j, int k) { return shared.slice_y[(tx + 16 * j) * Tile::kSlicePitch + k]; });
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) acc[i][j] += sum[i][j];
  }
}

// acc += w (kSide, kSide) x[:, col, col + kOut), or w^T. x has `x_rows` rows and `cols` columns.
// The function begins with a barrier that makes `w` visible.
template <bool kTransposed, class T>
__device__ void fma_weighted_rows(FmaOut<T>& acc, const Accum<T>* w, const T* x, int64_t x_stride,
                                  int x_rows, int64_t col, int64_t cols,
                                  const FmaShared<T>& shared) {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  for (int k0 = 0; k0 < Tile::kSide; k0 += Tile::kDepth) {
    __syncthreads();
    for (int e = threadIdx.x; e < Tile::kDepth * Tile::kOut; e += Tile::kThreads) {
      const int r = e / Tile::kOut, c = e % Tile::kOut;
      shared.right[r * Tile::kOutPitch + c] = k0 + r < x_rows && col + c < cols
                                                  ? convert<Acc>(x[(k0 + r) * x_stride + col + c])
                                                  : Acc(0);
    }
    __syncthreads();
    fma_slice<Tile::kDepth>(
        acc,
        [&](int i, int k) {
          const int row = ty + 16 * i;
          return kTransposed ? w[(k0 + k) * Tile::kScorePitch + row]
                             : w[row * Tile::kScorePitch + k0 + k];
        },
        [&](int j, int k) { return shared.right[k * Tile::kOutPitch + tx + 16 * j]; });
  }
}

template <class T>
__device__ void fma_store(const FmaOut<T>& acc, T* x, int64_t x_stride, int rows, int64_t col,
                          int64_t cols, Accum<T> scale) {
  using Tile = FmaTile<T>;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kOutPer; ++j) {
      const int row = ty + 16 * i;
      const int64_t c = col + tx + 16 * j;
      if (row < rows && c < cols) x[row * x_stride + c] = convert<T>(acc[i][j] * scale);
    }
}

// The place of a tile of scores: queries from `row`, keys from `col`, head h of batch b.
struct ScoreTile {
  int64_t b, h, row, col;
};

__device__ __forceinline__ float tanh_accum(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_accum(double x) { return tanh(x); }

// S of a tile: scale * q k^T + mask; -inf if hidden or outside. kWindowed: also with a window and
// softcap. Then `slopes` gets cap'.
template <class T, bool kWindowed>
__device__ void fma_scores(const AttentionParams& p, const ScoreTile& t, FmaScores<T>& s,
                           FmaScores<T>& slopes, const FmaShared<T>& shared) {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  const int64_t h_kv = t.h / (p.H / p.H_kv);
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  fma_row_products<T>(s, operand_rows<T>(p.q, t.b, t.h, t.row), p.q.stride_s,
                      static_cast<int>(min(int64_t(Tile::kSide), p.S_q - t.row)),
                      operand_rows<T>(p.k, t.b, h_kv, t.col), p.k.stride_s,
                      static_cast<int>(min(int64_t(Tile::kSide), p.S_k - t.col)), p.D, shared);
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) {
      const int64_t row = t.row + ty + 16 * i, col = t.col + tx + 16 * j;
      bool hidden = row >= p.S_q || col >= p.S_k || (p.is_causal && col > row);
      if constexpr (kWindowed) {
        slopes[i][j] = 1;
        hidden |= col > row + last_seen(p) || col < row - p.window_left;
      }
      if (hidden) {
        s[i][j] = -Acc(INFINITY);
      } else {
        s[i][j] *= static_cast<Acc>(p.scale);
        if constexpr (kWindowed) {
          if (p.softcap > 0) {
            const Acc cap = static_cast<Acc>(p.softcap), tanh = tanh_accum(s[i][j] / cap);
            s[i][j] = cap * tanh;
            slopes[i][j] = 1 - tanh * tanh;
          }
        }
        if (p.mask_type != MaskType::kNone) s[i][j] += mask_term<T>(p, t.b, t.h, row, col);
      }
    }
}

template <class T>
__device__ __forceinline__ Accum<T> fma_dropout_factor(const AttentionParams& p,
                                                       const DropoutKey& key, Accum<T> keep_scale,
                                                       const ScoreTile& t, int i, int j) {
  const bool keep = dropout_keeps(key, t.b * p.H + t.h, t.row + threadIdx.x / 16 + 16 * i,
                                  t.col + threadIdx.x % 16 + 16 * j);
  return keep ? keep_scale : Accum<T>(0);
}

// The 16 lanes that share ty are half a warp.
template <class A, class Op>
__device__ __forceinline__ A reduce_over_tx(A value, Op op) {
  return warp_reduce<16>(value, op);
}

}  // namespace warpwright
