// Forward on FMA units: scores, online softmax and weighted values of a tile of queries.
#pragma once

#include "ops/attention/cuda/portable/fma_tile.cuh"

namespace warpwright {

// A tile of queries of head h of batch b, from row0 on, and one chunk of the columns of out. lse:
// of row row0.
template <class T, bool kWindowed>
__device__ __forceinline__ void attend_fma(const AttentionParams& p, uint32_t threshold,
                                           Accum<T> keep_scale, int64_t b, int64_t h, int64_t row0,
                                           int64_t chunk, AttentionLse<T>* lse) {
  using Tile = FmaTile<T>;
  using Acc = Accum<T>;
  const FmaShared<T> shared(attention_smem);
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  const int64_t h_kv = h / (p.H / p.H_kv);
  const int rows = static_cast<int>(min(int64_t(Tile::kSide), p.S_q - row0));
  const bool dropout = p.philox_state != nullptr;
  const DropoutKey key = dropout ? load_dropout_key(p, threshold) : DropoutKey(0, 0, 0);

  Acc row_max[Tile::kPer], row_sum[Tile::kPer];
  FmaOut<T> out = {};
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) row_max[i] = -Acc(INFINITY), row_sum[i] = 0;

  const auto [begin, end] = key_blocks<kWindowed, Tile::kSide>(p, row0, row0 + rows);
  for (int64_t col = begin; col < end; col += Tile::kSide) {
    const ScoreTile t{b, h, row0, col};
    FmaScores<T> s, slopes;
    fma_scores<T, kWindowed>(p, t, s, slopes, shared);
    __syncthreads();  // with D = 0, other threads still read the previous tile's P
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      Acc tile_max = -Acc(INFINITY);
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) tile_max = max(tile_max, s[i][j]);
      const Acc new_max = max(row_max[i], reduce_over_tx(tile_max, Max()));
      // A row with nothing visible yet: exp(-inf - 0) = 0; -inf - -inf would be NaN.
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
      lse[row] = hidden ? -Lse(INFINITY) : Lse(row_max[i]) + log_accum(Lse(sum));
    }
  }
  fma_store<T>(out, operand_rows<T>(p.out, b, h, row0), p.out.stride_s, rows, chunk * Tile::kOut,
               p.D_v, Acc(1));
}

// q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), out (B, H, S_q, D_v)
// grid.x = (B * H, query tiles, column chunks of out), the last fastest; causal: longest tile first
template <class T, bool kWindowed>
__global__ void __launch_bounds__(FmaTile<T>::kThreads, kWindowed ? 1 : 2)
    attention_fwd_fma_kernel(const __grid_constant__ AttentionParams p, uint32_t threshold,
                             Accum<T> keep_scale) {
  using Tile = FmaTile<T>;
  const int64_t chunks = max(int64_t(1), ceil_div(p.D_v, int64_t(Tile::kOut)));
  const int64_t tiles = ceil_div(p.S_q, int64_t(Tile::kSide));
  const int64_t chunk = blockIdx.x % chunks, bh = blockIdx.x / chunks / tiles;
  const int64_t row0 = (tiles - 1 - blockIdx.x / chunks % tiles) * Tile::kSide;
  attend_fma<T, kWindowed>(p, threshold, keep_scale, bh / p.H, bh % p.H, row0, chunk,
                           static_cast<AttentionLse<T>*>(p.lse) + bh * p.S_q + row0);
}

// The same of packed sequences, whose window each of them moves. grid.x = (the most tiles that
// there can be, column chunks of out), the last fastest
template <class T>
__global__ void __launch_bounds__(FmaTile<T>::kThreads)
    attention_fwd_packed_fma_kernel(const __grid_constant__ AttentionParams p,
                                    const __grid_constant__ SequenceTileList list) {
  const int64_t chunks = max(int64_t(1), ceil_div(p.D_v, int64_t(FmaTile<T>::kOut)));
  const PackedTileOfHead at(list, blockIdx.x / chunks);
  if (!at.exists) return;
  const AttentionParams one = at.params(p);
  attend_fma<T, true>(
      one, 0, 1, 0, at.h, at.tile.row0, blockIdx.x % chunks,
      static_cast<AttentionLse<T>*>(p.lse) + at.h * p.S_q + at.q_begin() + at.tile.row0);
}

template <class T>
void launch_attention_fwd_packed_fma(const AttentionParams& p, const SequenceTileList& list,
                                     cudaStream_t stream) {
  using Tile = FmaTile<T>;
  const int64_t ctas =
      list.plan.all_tiles() * std::max(int64_t(1), ceil_div(p.D_v, int64_t(Tile::kOut)));
  launch(attention_fwd_packed_fma_kernel<T>, dim3(static_cast<unsigned>(ctas)),
         dim3(Tile::kThreads), Tile::kSmem, stream, p, list);
}

template <class T>
void launch_attention_fwd_fma(const AttentionParams& p, cudaStream_t stream) {
  using Tile = FmaTile<T>;
  const int64_t ctas = p.B * p.H * ceil_div(p.S_q, int64_t(Tile::kSide)) *
                       std::max(int64_t(1), ceil_div(p.D_v, int64_t(Tile::kOut)));
  const auto kernel =
      is_windowed(p) ? attention_fwd_fma_kernel<T, true> : attention_fwd_fma_kernel<T, false>;
  launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Tile::kThreads), Tile::kSmem, stream, p,
         dropout_threshold(p.dropout_p), static_cast<Accum<T>>(dropout_keep_scale(p.dropout_p)));
}

}  // namespace warpwright
