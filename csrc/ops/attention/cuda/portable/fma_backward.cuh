// Backward on FMA units: one kernel for dq, one for dk and dv, one for the gradient of the mask.
#pragma once

#include "ops/attention/cuda/portable/fma_tile.cuh"

namespace warpwright {

// The statistics that attention_row_stats_kernel wrote for (heads, rows): heads of all batches.
struct FmaStatsOfHeads {
  const void* data;
  int64_t heads, rows;
  int64_t begin;  // of a head's rows, in packed sequences

  __device__ explicit FmaStatsOfHeads(const AttentionBackwardParams& p, int64_t begin = 0)
      : data(p.row_stats), heads(p.fwd.B * p.fwd.H), rows(p.fwd.S_q), begin(begin) {}
};

// The rows' log-sum-exp as a sum of two numbers (+inf and 0 for a hidden row: exp(S - inf) = 0),
// and delta. Rows past S_q count as hidden.
template <class T>
struct FmaRowStats {
  static constexpr bool kHasRest = sizeof(AttentionLse<T>) > sizeof(Accum<T>);
  Accum<T> lse[FmaTile<T>::kPer], lse_rest[FmaTile<T>::kPer], delta[FmaTile<T>::kPer];

  __device__ FmaRowStats(const FmaStatsOfHeads& of, int64_t bh, int64_t row0, int64_t S_q) {
    const int64_t all_rows = of.heads * of.rows;
    const Accum<T>* stats = static_cast<const Accum<T>*>(of.data) + bh * of.rows + of.begin;
#pragma unroll
    for (int i = 0; i < FmaTile<T>::kPer; ++i) {
      const int64_t row = row0 + threadIdx.x / 16 + 16 * i;
      const bool inside = row < S_q;
      lse[i] = inside ? stats[row] : Accum<T>(INFINITY);
      delta[i] = inside ? stats[all_rows + row] : Accum<T>(0);
      lse_rest[i] = kHasRest && inside ? stats[2 * all_rows + row] : Accum<T>(0);
    }
  }
};

// P * Z and dS of a tile, in registers. kUncapped: dS before softcap.
template <class T, bool kWindowed, bool kUncapped = kWindowed>
__device__ void fma_grad_scores(const AttentionBackwardParams& p, const ScoreTile& t,
                                const FmaRowStats<T>& stats, uint32_t threshold,
                                Accum<T> keep_scale, FmaScores<T>& a, FmaScores<T>& ds,
                                const FmaShared<T>& shared) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const int64_t h_kv = t.h / (f.H / f.H_kv);
  const bool dropout = f.philox_state != nullptr;
  const DropoutKey key = dropout ? load_dropout_key(f, threshold) : DropoutKey(0, 0, 0);
  FmaScores<T> slopes;
  fma_scores<T, kWindowed>(f, t, a, slopes, shared);
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
      if constexpr (kUncapped) ds[i][j] *= slopes[i][j];
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

// dq of a tile of queries of head h of batch b, from row0 on, and one chunk of its columns.
template <class T, bool kWindowed>
__device__ __forceinline__ void differentiate_q_fma(const AttentionBackwardParams& p,
                                                    uint32_t threshold, Accum<T> keep_scale,
                                                    int64_t b, int64_t h, int64_t row0,
                                                    int64_t chunk,
                                                    const FmaStatsOfHeads& stats_of_heads) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const FmaShared<T> shared(attention_smem);
  const int64_t h_kv = h / (f.H / f.H_kv);
  const int rows = static_cast<int>(min(int64_t(Tile::kSide), f.S_q - row0));
  const FmaRowStats<T> stats(stats_of_heads, b * f.H + h, row0, f.S_q);
  FmaOut<T> dq = {};

  const auto [begin, end] = key_blocks<kWindowed, Tile::kSide>(f, row0, row0 + rows);
  for (int64_t col = begin; col < end; col += Tile::kSide) {
    FmaScores<T> a, ds;
    fma_grad_scores<T, kWindowed>(p, {b, h, row0, col}, stats, threshold, keep_scale, a, ds,
                                  shared);
    __syncthreads();
    fma_to_shared<T>(ds, shared.ds);
    fma_weighted_rows<false, T>(dq, shared.ds, operand_rows<T>(f.k, b, h_kv, col), f.k.stride_s,
                                static_cast<int>(min(int64_t(Tile::kSide), f.S_k - col)),
                                chunk * Tile::kOut, f.D, shared);
  }
  fma_store<T>(dq, operand_rows<T>(p.dq, b, h, row0), p.dq.stride_s, rows, chunk * Tile::kOut, f.D,
               static_cast<Accum<T>>(f.scale));
}

// dq (B, H, S_q, D); grid.x = (B * H, query tiles, column chunks of dq), the last fastest
template <class T, bool kWindowed>
__global__ void __launch_bounds__(FmaTile<T>::kThreads, kWindowed ? 1 : 2)
    attention_bwd_dq_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                uint32_t threshold, Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const int64_t chunks = ceil_div(f.D, int64_t(Tile::kOut));
  const int64_t tiles = ceil_div(f.S_q, int64_t(Tile::kSide));
  const int64_t chunk = blockIdx.x % chunks, bh = blockIdx.x / chunks / tiles;
  const int64_t row0 = (tiles - 1 - blockIdx.x / chunks % tiles) * Tile::kSide;
  differentiate_q_fma<T, kWindowed>(p, threshold, keep_scale, bh / f.H, bh % f.H, row0, chunk,
                                    FmaStatsOfHeads(p));
}

// dk and dv of a tile of keys of head h_kv of batch b, from col0 on, and one chunk of their
// columns.
template <class T, bool kWindowed>
__device__ __forceinline__ void differentiate_kv_fma(const AttentionBackwardParams& p,
                                                     uint32_t threshold, Accum<T> keep_scale,
                                                     int64_t b, int64_t h_kv, int64_t col0,
                                                     int64_t chunk,
                                                     const FmaStatsOfHeads& stats_of_heads) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const FmaShared<T> shared(attention_smem);
  const int64_t group = f.H / f.H_kv;
  const int cols = static_cast<int>(min(int64_t(Tile::kSide), f.S_k - col0));
  const int64_t out_col = chunk * Tile::kOut;
  const bool want_dk = p.dk.data != nullptr && out_col < f.D;
  const bool want_dv = p.dv.data != nullptr && out_col < f.D_v;
  if (!want_dk && !want_dv) return;
  FmaOut<T> dk = {}, dv = {};

  const auto [row_begin, row_end] = query_blocks<kWindowed, Tile::kSide>(f, col0, col0 + cols);
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    for (int64_t row = row_begin; row < row_end; row += Tile::kSide) {
      const int rows = static_cast<int>(min(int64_t(Tile::kSide), f.S_q - row));
      const FmaRowStats<T> stats(stats_of_heads, b * f.H + h, row, f.S_q);
      FmaScores<T> a, ds;
      fma_grad_scores<T, kWindowed>(p, {b, h, row, col0}, stats, threshold, keep_scale, a, ds,
                                    shared);
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

// dk (B, H_kv, S_k, D), dv (B, H_kv, S_k, D_v)
// grid.x = (B * H_kv, key tiles, column chunks of the wider of dk and dv), the last fastest
template <class T, bool kWindowed>
__global__ void __launch_bounds__(FmaTile<T>::kThreads)
    attention_bwd_dkdv_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                  uint32_t threshold, Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  const int64_t chunks = ceil_div(max(f.D, f.D_v), int64_t(Tile::kOut));
  const int64_t tiles = ceil_div(f.S_k, int64_t(Tile::kSide));
  const int64_t chunk = blockIdx.x % chunks, b_kv = blockIdx.x / chunks / tiles;
  const int64_t col0 = blockIdx.x / chunks % tiles * Tile::kSide;
  differentiate_kv_fma<T, kWindowed>(p, threshold, keep_scale, b_kv / f.H_kv, b_kv % f.H_kv, col0,
                                     chunk, FmaStatsOfHeads(p));
}

// The gradients of packed sequences. grid.x = (the most tiles that there can be, column chunks),
// the last fastest
__device__ __forceinline__ AttentionBackwardParams
sequence_gradients(const PackedTileOfHead& at, const AttentionBackwardParams& p) {
  const int64_t element = dtype_size(p.fwd.dtype);
  AttentionBackwardParams one = p;
  one.fwd = at.params(p.fwd);
  one.dout = rows_from(p.dout, at.q_begin(), element);
  one.dq = rows_from(p.dq, at.q_begin(), element);
  one.dk = rows_from(p.dk, at.k_begin(), element);
  one.dv = rows_from(p.dv, at.k_begin(), element);
  return one;
}
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads)
    attention_bwd_dq_packed_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                       const __grid_constant__ SequenceTileList list) {
  const int64_t chunks = ceil_div(p.fwd.D, int64_t(FmaTile<T>::kOut));
  const PackedTileOfHead at(list, blockIdx.x / chunks);
  if (!at.exists) return;
  differentiate_q_fma<T, true>(sequence_gradients(at, p), 0, 1, 0, at.h, at.tile.row0,
                               blockIdx.x % chunks, FmaStatsOfHeads(p, at.q_begin()));
}
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads)
    attention_bwd_dkdv_packed_fma_kernel(const __grid_constant__ AttentionBackwardParams p,
                                         const __grid_constant__ SequenceTileList list) {
  const int64_t chunks = ceil_div(max(p.fwd.D, p.fwd.D_v), int64_t(FmaTile<T>::kOut));
  const PackedTileOfHead at(list, blockIdx.x / chunks);
  if (!at.exists) return;
  differentiate_kv_fma<T, true>(sequence_gradients(at, p), 0, 1, 0, at.h, at.tile.row0,
                                blockIdx.x % chunks, FmaStatsOfHeads(p, at.q_begin()));
}

template <class T>
void launch_attention_bwd_packed_fma(const AttentionBackwardParams& p,
                                     const SequenceTileList& queries, const SequenceTileList& keys,
                                     cudaStream_t stream) {
  using Tile = FmaTile<T>;
  const AttentionParams& f = p.fwd;
  auto run = [&](auto kernel, const SequenceTileList& list, int64_t width) {
    const int64_t ctas = list.plan.all_tiles() * ceil_div(width, int64_t(Tile::kOut));
    if (ctas > 0)
      launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads), Tile::kSmem, stream,
             p, list);
  };
  if (p.dq.data != nullptr) run(attention_bwd_dq_packed_fma_kernel<T>, queries, f.D);
  if (p.dk.data != nullptr || p.dv.data != nullptr)
    run(attention_bwd_dkdv_packed_fma_kernel<T>, keys, std::max(f.D, f.D_v));
}

// dmask (B|1, H|1, S_q|1, S_k|1), accumulator type: the sum of dS over the broadcast dimensions, in
// one CTA and one order. grid.x = (B|1, H|1, query tiles|1, key tiles|1), last fastest
template <class T, bool kWindowed>
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
        const FmaRowStats<T> stats(FmaStatsOfHeads(p), b * f.H + h, row, f.S_q);
        const PositionRange keys =
            key_blocks<kWindowed, Tile::kSide>(f, row, min(f.S_q, row + Tile::kSide));
        for (int64_t j = begin[3]; j < end[3]; ++j) {
          const int64_t col = j * Tile::kSide;
          if (col < keys.begin) continue;
          if (col >= keys.end) break;
          FmaScores<T> a, ds;
          fma_grad_scores<T, kWindowed, /*kUncapped=*/false>(p, {b, h, row, col}, stats, threshold,
                                                             keep_scale, a, ds, shared);
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
  // One thread per element of dmask: a row's sum if keys broadcast, a column's if queries do.
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
  const bool windowed = is_windowed(f);
  if (p.dq.data != nullptr)
    run(windowed ? attention_bwd_dq_fma_kernel<T, true> : attention_bwd_dq_fma_kernel<T, false>,
        f.B * f.H * q_tiles * ceil_div(f.D, int64_t(Tile::kOut)));
  if (p.dk.data != nullptr || p.dv.data != nullptr)
    run(windowed ? attention_bwd_dkdv_fma_kernel<T, true> : attention_bwd_dkdv_fma_kernel<T, false>,
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
  const auto kernel = is_windowed(f) ? attention_bwd_mask_fma_kernel<T, true>
                                     : attention_bwd_mask_fma_kernel<T, false>;
  launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads), Tile::kSmem, stream, p,
         dropout_threshold(f.dropout_p), static_cast<Accum<T>>(dropout_keep_scale(f.dropout_p)));
}

}  // namespace warpwright
