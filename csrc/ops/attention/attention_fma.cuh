// Flash attention on FMA units, for fp32, fp64 and head dimensions that no tensor-core tile holds.
// A CTA has 16 x 16 threads; thread (ty, tx) owns rows ty + 16 i and columns tx + 16 j of each
// tile. Depth is walked in slices of 16; an output wider than 64 columns is split over CTAs, each
// of which recomputes the scores.
#pragma once

#include <algorithm>

#include "device/math.cuh"
#include "ops/attention/attention_common.cuh"
#include "ops/attention/attention_launch.h"

namespace warpwright {

template <class T>
struct FmaTile {
  using Acc = Accum<T>;
  static constexpr int kSide = sizeof(Acc) == 8 ? 32 : 64;  // queries, and keys, of a tile
  static constexpr int kPer = kSide / 16;                   // rows, and columns, of a thread
  static constexpr int kDepth = 16;
  static constexpr int kOut = 64;  // output columns of a CTA
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

template <class T>
using FmaScores = Accum<T>[FmaTile<T>::kPer][FmaTile<T>::kPer];
template <class T>
using FmaOut = Accum<T>[FmaTile<T>::kPer][FmaTile<T>::kOutPer];

__device__ __forceinline__ float exp_accum(float x) { return expf(x); }
__device__ __forceinline__ double exp_accum(double x) { return exp(x); }
__device__ __forceinline__ float log_accum(float x) { return logf(x); }
__device__ __forceinline__ double log_accum(double x) { return log(x); }

// acc += the product over one slice.
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

// acc = x (x_rows, depth) y (y_rows, depth)^T; rows past the extents count as zero.
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
    // A slice is summed by itself first: one long chain of additions would lose digits, and the
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

// acc += w (kSide, kSide) x[:, col, col + kOut), or w^T; x has `x_rows` rows and `cols` columns.
// `w` is visible after the barrier that this begins with.
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

// Where a tile of scores sits: queries from `row`, keys from `col`, of head h of batch b.
struct ScoreTile {
  int64_t b, h, row, col;
};

// S of a tile: scale * q k^T + mask, -inf where hidden or outside.
template <class T>
__device__ void fma_scores(const AttentionParams& p, const ScoreTile& t, FmaScores<T>& s,
                           const FmaShared<T>& shared) {
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
      if (row >= p.S_q || col >= p.S_k || (p.is_causal && col > row)) {
        s[i][j] = -Acc(INFINITY);
      } else {
        s[i][j] *= static_cast<Acc>(p.scale);
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

// q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), out (B, H, S_q, D_v)
// grid.x = (B * H, query tiles, column chunks of out), the last fastest; causal: longest tile first
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads, 2)
    attention_fwd_fma_kernel(const __grid_constant__ AttentionParams p, uint32_t threshold,
                             Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  const FmaShared<T> shared(attention_smem);
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  const int64_t chunks = max(int64_t(1), ceil_div(p.D_v, int64_t(Tile::kOut)));
  const int64_t tiles = ceil_div(p.S_q, int64_t(Tile::kSide));
  const int64_t chunk = blockIdx.x % chunks, bh = blockIdx.x / chunks / tiles;
  const int64_t b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int64_t row0 = (tiles - 1 - blockIdx.x / chunks % tiles) * Tile::kSide;
  const int rows = static_cast<int>(min(int64_t(Tile::kSide), p.S_q - row0));
  const bool dropout = p.philox_state != nullptr;
  const DropoutKey key = dropout ? load_dropout_key(p, threshold) : DropoutKey(0, 0, 0);

  Acc row_max[Tile::kPer], row_sum[Tile::kPer];
  FmaOut<T> out = {};
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) row_max[i] = -Acc(INFINITY), row_sum[i] = 0;

  const int64_t keys = visible_keys(p, row0 + rows);
  for (int64_t col = 0; col < keys; col += Tile::kSide) {
    const ScoreTile t{b, h, row0, col};
    FmaScores<T> s;
    fma_scores<T>(p, t, s, shared);
    __syncthreads();  // the last tile's P is still being read where D = 0
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      Acc tile_max = -Acc(INFINITY);
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) tile_max = max(tile_max, s[i][j]);
      const Acc new_max = max(row_max[i], reduce_over_tx(tile_max, Max()));
      // A row with nothing visible yet: exp(-inf - 0) = 0, where -inf - -inf would be NaN.
      const Acc base = new_max == -Acc(INFINITY) ? Acc(0) : new_max;
      const Acc correction = exp_accum(row_max[i] - base);
      row_max[i] = new_max;
      row_sum[i] *= correction;
#pragma unroll
      for (int j = 0; j < Tile::kOutPer; ++j) out[i][j] *= correction;
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        Acc value = exp_accum(s[i][j] - base);
        row_sum[i] += value;
        if (dropout) value *= fma_dropout_factor<T>(p, key, keep_scale, t, i, j);
        shared.p[(ty + 16 * i) * Tile::kScorePitch + tx + 16 * j] = value;
      }
    }
    fma_weighted_rows<false, T>(out, shared.p, operand_rows<T>(p.v, b, h_kv, col), p.v.stride_s,
                                static_cast<int>(min(int64_t(Tile::kSide), p.S_k - col)),
                                chunk * Tile::kOut, p.D_v, shared);
  }

#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    const Acc sum = reduce_over_tx(row_sum[i], Sum());
    const int row = ty + 16 * i;
    const bool hidden = sum == Acc(0);
#pragma unroll
    for (int j = 0; j < Tile::kOutPer; ++j) out[i][j] = hidden ? Acc(0) : out[i][j] / sum;
    if (chunk == 0 && tx == 0 && row < rows) {
      using Lse = AttentionLse<T>;
      static_cast<Lse*>(p.lse)[bh * p.S_q + row0 + row] =
          hidden ? -Lse(INFINITY) : Lse(row_max[i]) + log_accum(Lse(sum));
    }
  }
  fma_store<T>(out, operand_rows<T>(p.out, b, h, row0), p.out.stride_s, rows, chunk * Tile::kOut,
               p.D_v, Acc(1));
}

// The rows' log-sum-exp as a sum of two (+inf and 0 for a hidden row: exp(S - inf) = 0) and delta,
// from the workspace that attention_row_stats_kernel wrote; rows past S_q count as hidden.
template <class T>
struct FmaRowStats {
  static constexpr bool kHasRest = sizeof(AttentionLse<T>) > sizeof(Accum<T>);
  Accum<T> lse[FmaTile<T>::kPer], lse_rest[FmaTile<T>::kPer], delta[FmaTile<T>::kPer];

  __device__ FmaRowStats(const AttentionBackwardParams& p, int64_t bh, int64_t row0) {
    const Accum<T>* stats = static_cast<const Accum<T>*>(p.row_stats);
    const int64_t all_rows = p.fwd.B * p.fwd.H * p.fwd.S_q;
#pragma unroll
    for (int i = 0; i < FmaTile<T>::kPer; ++i) {
      const int64_t row = row0 + threadIdx.x / 16 + 16 * i;
      const bool inside = row < p.fwd.S_q;
      lse[i] = inside ? stats[bh * p.fwd.S_q + row] : Accum<T>(INFINITY);
      delta[i] = inside ? stats[all_rows + bh * p.fwd.S_q + row] : Accum<T>(0);
      lse_rest[i] = kHasRest && inside ? stats[2 * all_rows + bh * p.fwd.S_q + row] : Accum<T>(0);
    }
  }
};

// P * Z and dS of a tile, in registers.
template <class T>
__device__ void fma_grad_scores(const AttentionBackwardParams& p, const ScoreTile& t,
                                const FmaRowStats<T>& stats, uint32_t threshold,
                                Accum<T> keep_scale, FmaScores<T>& a, FmaScores<T>& ds,
                                const FmaShared<T>& shared) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const int64_t h_kv = t.h / (f.H / f.H_kv);
  const bool dropout = f.philox_state != nullptr;
  const DropoutKey key = dropout ? load_dropout_key(f, threshold) : DropoutKey(0, 0, 0);
  fma_scores<T>(f, t, a, shared);
  fma_row_products<T>(ds, operand_rows<T>(p.dout, t.b, t.h, t.row), p.dout.stride_s,
                      static_cast<int>(min(int64_t(Tile::kSide), f.S_q - t.row)),
                      operand_rows<T>(f.v, t.b, h_kv, t.col), f.v.stride_s,
                      static_cast<int>(min(int64_t(Tile::kSide), f.S_k - t.col)), f.D_v, shared);
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) {
      const Accum<T> probability = exp_accum(a[i][j] - stats.lse[i] - stats.lse_rest[i]);
      const Accum<T> factor =
          dropout ? fma_dropout_factor<T>(f, key, keep_scale, t, i, j) : Accum<T>(1);
      a[i][j] = probability * factor;
      ds[i][j] = probability * (ds[i][j] * factor - stats.delta[i]);
    }
}

template <class T>
__device__ void fma_to_shared(const FmaScores<T>& scores, Accum<T>* target) {
  using Tile = FmaTile<T>;
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i)
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j)
      target[(threadIdx.x / 16 + 16 * i) * Tile::kScorePitch + threadIdx.x % 16 + 16 * j] =
          scores[i][j];
}

// dq (B, H, S_q, D); grid.x = (B * H, query tiles, column chunks of dq), the last fastest
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads, 2)
    attention_bwd_dq_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                uint32_t threshold, Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const FmaShared<T> shared(attention_smem);
  const int64_t chunks = ceil_div(f.D, int64_t(Tile::kOut));
  const int64_t tiles = ceil_div(f.S_q, int64_t(Tile::kSide));
  const int64_t chunk = blockIdx.x % chunks, bh = blockIdx.x / chunks / tiles;
  const int64_t b = bh / f.H, h = bh % f.H, h_kv = h / (f.H / f.H_kv);
  const int64_t row0 = (tiles - 1 - blockIdx.x / chunks % tiles) * Tile::kSide;
  const int rows = static_cast<int>(min(int64_t(Tile::kSide), f.S_q - row0));
  const FmaRowStats<T> stats(p, bh, row0);
  FmaOut<T> dq = {};

  const int64_t keys = visible_keys(f, row0 + rows);
  for (int64_t col = 0; col < keys; col += Tile::kSide) {
    FmaScores<T> a, ds;
    fma_grad_scores<T>(p, {b, h, row0, col}, stats, threshold, keep_scale, a, ds, shared);
    __syncthreads();
    fma_to_shared<T>(ds, shared.ds);
    fma_weighted_rows<false, T>(dq, shared.ds, operand_rows<T>(f.k, b, h_kv, col), f.k.stride_s,
                                static_cast<int>(min(int64_t(Tile::kSide), f.S_k - col)),
                                chunk * Tile::kOut, f.D, shared);
  }
  fma_store<T>(dq, operand_rows<T>(p.dq, b, h, row0), p.dq.stride_s, rows, chunk * Tile::kOut, f.D,
               static_cast<Accum<T>>(f.scale));
}

// dk (B, H_kv, S_k, D), dv (B, H_kv, S_k, D_v)
// grid.x = (B * H_kv, key tiles, column chunks of the wider of dk and dv), the last fastest
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads)
    attention_bwd_dkdv_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                  uint32_t threshold, Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const FmaShared<T> shared(attention_smem);
  const int64_t chunks = ceil_div(max(f.D, f.D_v), int64_t(Tile::kOut));
  const int64_t tiles = ceil_div(f.S_k, int64_t(Tile::kSide));
  const int64_t chunk = blockIdx.x % chunks, b_kv = blockIdx.x / chunks / tiles;
  const int64_t b = b_kv / f.H_kv, h_kv = b_kv % f.H_kv, group = f.H / f.H_kv;
  const int64_t col0 = blockIdx.x / chunks % tiles * Tile::kSide;
  const int cols = static_cast<int>(min(int64_t(Tile::kSide), f.S_k - col0));
  const int64_t out_col = chunk * Tile::kOut;
  const bool want_dk = p.dk.data != nullptr && out_col < f.D;
  const bool want_dv = p.dv.data != nullptr && out_col < f.D_v;
  if (!want_dk && !want_dv) return;
  FmaOut<T> dk = {}, dv = {};

  // Queries before the tile's first key do not see it; col0 is a multiple of the tile's side.
  const int64_t row_begin = f.is_causal ? col0 : 0;
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    for (int64_t row = row_begin; row < f.S_q; row += Tile::kSide) {
      const int rows = static_cast<int>(min(int64_t(Tile::kSide), f.S_q - row));
      const FmaRowStats<T> stats(p, b * f.H + h, row);
      FmaScores<T> a, ds;
      fma_grad_scores<T>(p, {b, h, row, col0}, stats, threshold, keep_scale, a, ds, shared);
      __syncthreads();
      fma_to_shared<T>(a, shared.p);
      fma_to_shared<T>(ds, shared.ds);
      if (want_dv) {
        fma_weighted_rows<true, T>(dv, shared.p, operand_rows<T>(p.dout, b, h, row),
                                   p.dout.stride_s, rows, out_col, f.D_v, shared);
      }
      if (want_dk) {
        fma_weighted_rows<true, T>(dk, shared.ds, operand_rows<T>(f.q, b, h, row), f.q.stride_s,
                                   rows, out_col, f.D, shared);
      }
    }
  }
  if (want_dk) {
    fma_store<T>(dk, operand_rows<T>(p.dk, b, h_kv, col0), p.dk.stride_s, cols, out_col, f.D,
                 static_cast<Accum<T>>(f.scale));
  }
  if (want_dv) {
    fma_store<T>(dv, operand_rows<T>(p.dv, b, h_kv, col0), p.dv.stride_s, cols, out_col, f.D_v,
                 Accum<T>(1));
  }
}

// dmask (B|1, H|1, S_q|1, S_k|1), accumulator type: the sum of dS over what the mask broadcasts
// along, in one CTA and one order. grid.x = (B|1, H|1, query tiles|1, key tiles|1), last fastest
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads)
    attention_bwd_mask_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                  uint32_t threshold, Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  const AttentionParams& f = p.fwd;
  const FmaShared<T> shared(attention_smem);
  const int64_t q_tiles = ceil_div(f.S_q, int64_t(Tile::kSide));
  const int64_t k_tiles = ceil_div(f.S_k, int64_t(Tile::kSide));
  const int64_t extent[4] = {f.B, f.H, q_tiles, k_tiles};
  int64_t begin[4], end[4], index = blockIdx.x;
#pragma unroll
  for (int d = 3; d >= 0; --d) {
    begin[d] = f.mask_full[d] ? index % extent[d] : 0;
    end[d] = f.mask_full[d] ? begin[d] + 1 : extent[d];
    if (f.mask_full[d]) index /= extent[d];
  }

  FmaScores<T> sum = {};
  for (int64_t b = begin[0]; b < end[0]; ++b) {
    for (int64_t h = begin[1]; h < end[1]; ++h) {
      for (int64_t i = begin[2]; i < end[2]; ++i) {
        const int64_t row = i * Tile::kSide;
        const FmaRowStats<T> stats(p, b * f.H + h, row);
        for (int64_t j = begin[3]; j < end[3]; ++j) {
          const int64_t col = j * Tile::kSide;
          if (col >= visible_keys(f, min(f.S_q, row + Tile::kSide))) break;
          FmaScores<T> a, ds;
          fma_grad_scores<T>(p, {b, h, row, col}, stats, threshold, keep_scale, a, ds, shared);
#pragma unroll
          for (int y = 0; y < Tile::kPer; ++y)
#pragma unroll
            for (int x = 0; x < Tile::kPer; ++x) sum[y][x] += ds[y][x];
        }
      }
    }
  }

  __syncthreads();
  fma_to_shared<T>(sum, shared.p);
  __syncthreads();
  const int64_t row0 = begin[2] * Tile::kSide, col0 = begin[3] * Tile::kSide;
  Acc* dmask = static_cast<Acc*>(p.dmask) + begin[0] * p.dmask_stride[0] +
               begin[1] * p.dmask_stride[1] + row0 * p.dmask_stride[2] + col0 * p.dmask_stride[3];
  // One thread an element of dmask: a row's sum where keys broadcast, a column's where queries do.
  const int out_rows = f.mask_full[2] ? Tile::kSide : 1;
  const int out_cols = f.mask_full[3] ? Tile::kSide : 1;
  for (int e = threadIdx.x; e < out_rows * out_cols; e += Tile::kThreads) {
    const int r0 = e / out_cols, c0 = e % out_cols;
    if (f.mask_full[2] && row0 + r0 >= f.S_q) continue;
    if (f.mask_full[3] && col0 + c0 >= f.S_k) continue;
    Acc total = 0;
    for (int r = r0; r < (f.mask_full[2] ? r0 + 1 : Tile::kSide); ++r) {
      for (int c = c0; c < (f.mask_full[3] ? c0 + 1 : Tile::kSide); ++c)
        total += shared.p[r * Tile::kScorePitch + c];
    }
    dmask[r0 * p.dmask_stride[2] + c0 * p.dmask_stride[3]] = total;
  }
}

template <class T>
void launch_attention_fwd_fma(const AttentionParams& p, cudaStream_t stream) {
  using Tile = FmaTile<T>;
  const int64_t ctas = p.B * p.H * ceil_div(p.S_q, int64_t(Tile::kSide)) *
                       std::max(int64_t(1), ceil_div(p.D_v, int64_t(Tile::kOut)));
  launch(attention_fwd_fma_kernel<T>, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads),
         Tile::kSmem, stream, p, dropout_threshold(p.dropout_p),
         static_cast<Accum<T>>(dropout_keep_scale(p.dropout_p)));
}

template <class T>
void launch_attention_bwd_fma(const AttentionBackwardParams& p, cudaStream_t stream) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const uint32_t threshold = dropout_threshold(f.dropout_p);
  const auto keep_scale = static_cast<Accum<T>>(dropout_keep_scale(f.dropout_p));
  const int64_t q_tiles = ceil_div(f.S_q, int64_t(Tile::kSide));
  const int64_t k_tiles = ceil_div(f.S_k, int64_t(Tile::kSide));
  auto run = [&](auto kernel, int64_t ctas) {
    if (ctas > 0)
      launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads), Tile::kSmem, stream,
             p, threshold, keep_scale);
  };
  if (p.dq.data != nullptr)
    run(attention_bwd_dq_fma_kernel<T>, f.B * f.H * q_tiles * ceil_div(f.D, int64_t(Tile::kOut)));
  if (p.dk.data != nullptr || p.dv.data != nullptr)
    run(attention_bwd_dkdv_fma_kernel<T>,
        f.B * f.H_kv * k_tiles * ceil_div(std::max(f.D, f.D_v), int64_t(Tile::kOut)));
}

template <class T>
void launch_attention_bwd_mask(const AttentionBackwardParams& p, cudaStream_t stream) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const int64_t extent[4] = {f.B, f.H, ceil_div(f.S_q, int64_t(Tile::kSide)),
                             ceil_div(f.S_k, int64_t(Tile::kSide))};
  int64_t ctas = 1;
  for (int d = 0; d < 4; ++d) ctas *= f.mask_full[d] ? extent[d] : 1;
  launch(attention_bwd_mask_fma_kernel<T>, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads),
         Tile::kSmem, stream, p, dropout_threshold(f.dropout_p),
         static_cast<Accum<T>>(dropout_keep_scale(f.dropout_p)));
}

}  // namespace warpwright
