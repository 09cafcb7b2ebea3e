// The backward on tensor cores (mma.sync, sm_80 and later) without float atomics. One kernel owns
// tiles of queries and sums dq over the keys. The other owns tiles of keys and sums dk and dv over
// the queries. Both recompute S and dP (7 products instead of 5), so CTAs need no order. dS and P
// feed the next product from registers: the second kernel computes their transposes.
#pragma once

#include "ops/attention/cuda/portable/mma.cuh"

namespace warpwright {

// kStages: how many tiles of the walked operand pair are in flight.
template <int kD_, int kTiles_, int kBlockN_, int kStages_>
struct AttentionDqTile {
  static constexpr int kD = kD_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kBlockM = 64 * kTiles_;  // queries, over 4 warps
  static constexpr int kBlockN = kBlockN_;      // keys
  static constexpr int kStages = kStages_;
  static constexpr int kSmem = (2 * kBlockM + 2 * kStages * kBlockN) * kD * 2;
};

template <int kD_, int kTiles_, int kBlockM_, int kStages_>
struct AttentionDkDvTile {
  static constexpr int kD = kD_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kBlockN = 64 * kTiles_;  // keys, over 4 warps
  static constexpr int kBlockM = kBlockM_;      // queries
  static constexpr int kStages = kStages_;
  static constexpr int kTileBytes = (2 * kBlockN + 2 * kStages * kBlockM) * kD * 2;
  static constexpr int kSmem = kTileBytes + kStages * 2 * kBlockM * 4;  // plus lse, delta
};

// Walks `count` tiles: issue(i, stage) starts the copies of tile i, compute(i, stage) uses them.
// With two stages the copies of tile i + 1 run during compute(i). The one barrier guarantees that
// tile i has arrived and that no thread still reads the other stage.
template <int kStages, class Issue, class Compute>
__device__ __forceinline__ void walk_tiles(int64_t count, Issue&& issue, Compute&& compute) {
  static_assert(kStages == 1 || kStages == 2, "one tile in use, at most one in flight");
  if (count > 0) issue(int64_t(0), 0);
  cp_async_commit();
  for (int64_t i = 0; i < count; ++i) {
    const int stage = kStages == 2 ? static_cast<int>(i % 2) : 0;
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 2) {
      if (i + 1 < count) issue(i + 1, stage ^ 1);
      cp_async_commit();
    }
    compute(i, stage);
    if constexpr (kStages == 1) {
      __syncthreads();
      if (i + 1 < count) issue(i + 1, 0);
      cp_async_commit();
    }
  }
  cp_async_wait<0>();
}

// Turns raw products into P, in place: 2^(scale_log2 * s + mask - lse), and dP into dS = P (Z dP -
// delta). Dropped elements of P become 0 afterwards. lse_of and delta_of return the statistics of
// an element's row.
template <class T, bool kTransposed, bool kHasExtras, bool kWantDs, int kTiles, int kCols,
          class Lse, class Delta>
__device__ __forceinline__ void grad_scores(const AttentionParams& p, const AttentionMmaArgs& args,
                                            float (&s)[kTiles][kCols][4],
                                            float (&dp)[kTiles][kCols][4], int64_t b, int64_t h,
                                            int64_t row0, int64_t col0, bool has_hidden,
                                            Lse&& lse_of, Delta&& delta_of) {
  const float scale_log2 = static_cast<float>(p.scale) * kLog2E;
  if constexpr (kHasExtras) add_mask<T, kTransposed>(p, s, b, h, row0, col0, scale_log2);
  if (has_hidden || (kHasExtras && is_windowed(p))) hide<kTransposed, kHasExtras>(p, s, row0, col0);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int n = 0; n < kCols; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[i][n][e] = ex2_approx(fmaf(s[i][n][e], kHasExtras ? 1.f : scale_log2, -lse_of(i, n, e)));

  // The factor of an element of dS that comes from its probability.
  const float uncap = kHasExtras ? 1.f / (static_cast<float>(p.softcap) * kLog2E) : 0.f;
  auto factor_of = [&](int i, int n, int e) {
    if constexpr (kHasExtras) {
      if (p.softcap > 0) {
        const int64_t row = row0 + fragment_row(i, e), col = col0 + fragment_col(n, e);
        const int64_t query = kTransposed ? col : row, key = kTransposed ? row : col;
        float base = lse_of(i, n, e);
        if (p.mask_type != MaskType::kNone && query < p.S_q && key < p.S_k)
          base -= mask_term<T>(p, b, h, query, key) * kLog2E;
        return uncapped(s[i][n][e], base, uncap);
      }
    }
    return s[i][n][e];
  };
  if constexpr (kHasExtras) {
    if (p.philox_state != nullptr) {
      const DropoutKey key = load_dropout_key(p, args.dropout_threshold);
      // dS comes first, from the undropped P: where P is dropped, dS is P (0 - delta). Then P.
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int pair = 0; pair < kCols / 2; ++pair) {
          uint32_t dropped = 0;
          for_dropped<kTransposed>(key, b * p.H + h, row0 + 16 * i, col0 + 16 * pair,
                                   [&](int n, int e) { dropped |= 1u << (4 * n + e); });
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& probability = s[i][2 * pair + n][e];
              const bool keep = (dropped >> (4 * n + e) & 1u) == 0;
              if constexpr (kWantDs) {
                float& ds = dp[i][2 * pair + n][e];
                ds = factor_of(i, 2 * pair + n, e) *
                     ((keep ? ds * args.keep_scale : 0.f) - delta_of(i, 2 * pair + n, e));
              }
              if (!keep) probability = 0.f;
            }
        }
      return;
    }
  }
  if constexpr (kWantDs) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kCols; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          dp[i][n][e] = factor_of(i, n, e) * (dp[i][n][e] - delta_of(i, n, e));
  }
}

template <int kTiles>
__device__ __forceinline__ void fill_scale(float (&scale)[kTiles][2], double value) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) scale[i][0] = scale[i][1] = static_cast<float>(value);
}

// q, dq (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), dout (B, H, S_q, D_v)
// shared: Q, dO (kBlockM, kD), then K, V (kBlockN, kD) per stage; warp w owns rows 16 kTiles w and
// following
// grid.x = (B * H, query tiles in reverse: under the causal rule the last is the longest)
template <class T, class Tile, bool kHasExtras>
__global__ void __launch_bounds__(kMmaThreads)
    attention_bwd_dq_mma_kernel(const __grid_constant__ AttentionBackwardParams params,
                                const __grid_constant__ AttentionMmaArgs args) {
  constexpr int kD = Tile::kD, kTiles = Tile::kTiles, kBlockM = Tile::kBlockM;
  constexpr int kBlockN = Tile::kBlockN, kCols = kBlockN / 8;
  const AttentionParams& p = params.fwd;
  T* sQ = reinterpret_cast<T*>(attention_smem);
  T* sDout = sQ + kBlockM * kD;
  T* sKeys = sDout + kBlockM * kD;  // (kStages, 2, kBlockN, kD)

  const int64_t tiles = ceil_div(p.S_q, int64_t(kBlockM));
  const int64_t bh = blockIdx.x / tiles, b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int64_t row0 = (tiles - 1 - blockIdx.x % tiles) * kBlockM;
  const int64_t rows = min(int64_t(kBlockM), p.S_q - row0);
  const int warp_row = threadIdx.x / kWarpSize * 16 * kTiles;

  load_tile<kBlockM, kD>(sQ, operand_rows<const T>(p.q, b, h, row0), p.q.stride_s, rows, p.D,
                         args.vectorized);
  load_tile<kBlockM, kD>(sDout, operand_rows<const T>(params.dout, b, h, row0),
                         params.dout.stride_s, rows, p.D_v, args.vectorized);
  const float* stats = static_cast<const float*>(params.row_stats);
  const int64_t all_rows = p.B * p.H * p.S_q;
  float lse[kTiles][2], delta[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + fragment_row(i, 2 * half);
      lse[i][half] = row < rows ? stats[bh * p.S_q + row0 + row] : INFINITY;
      delta[i][half] = row < rows ? stats[all_rows + bh * p.S_q + row0 + row] : 0.f;
    }

  float dq[kTiles][kD / 8][4];
  clear(dq);
  const auto [first_key, last_key] = key_blocks<kHasExtras, kBlockN>(p, row0, row0 + rows);
  auto issue = [&](int64_t i, int stage) {
    T* keys = sKeys + stage * 2 * kBlockN * kD;
    const int64_t col = first_key + i * kBlockN;
    load_tile<kBlockN, kD>(keys, operand_rows<const T>(p.k, b, h_kv, col), p.k.stride_s,
                           p.S_k - col, p.D, args.vectorized);
    load_tile<kBlockN, kD>(keys + kBlockN * kD, operand_rows<const T>(p.v, b, h_kv, col),
                           p.v.stride_s, p.S_k - col, p.D_v, args.vectorized);
  };
  auto compute = [&](int64_t i, int stage) {
    const uint32_t k_base = smem_address(sKeys + stage * 2 * kBlockN * kD);
    const uint32_t v_base = k_base + kBlockN * kD * 2;
    const int64_t col0 = first_key + i * kBlockN;
    float s[kTiles][kCols][4], dp[kTiles][kCols][4];
    clear(s);
    multiply_rows<T, kD>(s, smem_address(sQ), warp_row, k_base);
    clear(dp);
    multiply_rows<T, kD>(dp, smem_address(sDout), warp_row, v_base);
    const bool has_hidden = col0 + kBlockN > p.S_k || (p.is_causal && col0 + kBlockN > row0 + 1);
    grad_scores<T, false, kHasExtras, true>(
        p, args, s, dp, b, h, row0 + warp_row, col0, has_hidden,
        [&](int i, int, int e) { return lse[i][e / 2]; },
        [&](int i, int, int e) { return delta[i][e / 2]; });
    multiply_weighted<T, kD>(dq, dp, k_base);
  };
  walk_tiles<Tile::kStages>(ceil_div(last_key - first_key, int64_t(kBlockN)), issue, compute);

  float scale[kTiles][2];
  fill_scale(scale, p.scale);
  store_rows(dq, operand_rows<T>(params.dq, b, h, row0 + warp_row), params.dq.stride_s,
             rows - warp_row, p.D, scale, args.pair_stores);
}

// A tile of queries: its head and first row.
struct QueryTile {
  int64_t h, row;
};

// q (B, H, S_q, D), k, dk (B, H_kv, S_k, D), v, dv (B, H_kv, S_k, D_v), dout (B, H, S_q, D_v)
// shared: K, V (kBlockN, kD), then Q, dO (kBlockM, kD) per stage, then lse, delta (kBlockM) per
// stage; warp w owns keys 16 kTiles w and following; kWantDk, kWantDv: both, if the registers hold
// both sums
// grid.x = (B * H_kv, key tiles in order: under the causal rule the first is the longest)
template <class T, class Tile, bool kWantDk, bool kWantDv, bool kHasExtras>
__global__ void __launch_bounds__(kMmaThreads)
    attention_bwd_dkdv_mma_kernel(const __grid_constant__ AttentionBackwardParams params,
                                  const __grid_constant__ AttentionMmaArgs args) {
  constexpr int kD = Tile::kD, kTiles = Tile::kTiles, kBlockM = Tile::kBlockM;
  constexpr int kBlockN = Tile::kBlockN, kCols = kBlockM / 8;
  const AttentionParams& p = params.fwd;
  T* sK = reinterpret_cast<T*>(attention_smem);
  T* sV = sK + kBlockN * kD;
  T* sRows = sV + kBlockN * kD;  // (kStages, 2, kBlockM, kD)
  float* sStats =
      reinterpret_cast<float*>(reinterpret_cast<char*>(attention_smem) + Tile::kTileBytes);

  const int64_t tiles = ceil_div(p.S_k, int64_t(kBlockN));
  const int64_t b_kv = blockIdx.x / tiles, b = b_kv / p.H_kv, h_kv = b_kv % p.H_kv;
  const int64_t group = p.H / p.H_kv;
  const int64_t col0 = blockIdx.x % tiles * kBlockN;
  const int64_t cols = min(int64_t(kBlockN), p.S_k - col0);
  const int warp_col = threadIdx.x / kWarpSize * 16 * kTiles;

  load_tile<kBlockN, kD>(sK, operand_rows<const T>(p.k, b, h_kv, col0), p.k.stride_s, cols, p.D,
                         args.vectorized);
  if constexpr (kWantDk) {
    load_tile<kBlockN, kD>(sV, operand_rows<const T>(p.v, b, h_kv, col0), p.v.stride_s, cols, p.D_v,
                           args.vectorized);
  }
  const float* stats = static_cast<const float*>(params.row_stats);
  const int64_t all_rows = p.B * p.H * p.S_q;
  // The queries that see one of the tile's keys. The walk includes the group's heads.
  const auto [first_row, last_row] = query_blocks<kHasExtras, kBlockM>(p, col0, col0 + cols);
  const int64_t row_tiles = ceil_div(last_row - first_row, int64_t(kBlockM));
  const QueryTile start{h_kv * group, first_row};
  auto step = [&](QueryTile& tile) {
    tile.row += kBlockM;
    if (tile.row >= last_row) tile = {tile.h + 1, start.row};
  };
  QueryTile issued = start, computed = start;

  float dk[kTiles][kWantDk ? kD / 8 : 1][4], dv[kTiles][kWantDv ? kD / 8 : 1][4];
  clear(dk);
  clear(dv);
  auto issue = [&](int64_t, int stage) {
    const auto [h, row] = issued;
    step(issued);
    T* rows = sRows + stage * 2 * kBlockM * kD;
    load_tile<kBlockM, kD>(rows, operand_rows<const T>(p.q, b, h, row), p.q.stride_s, p.S_q - row,
                           p.D, args.vectorized);
    load_tile<kBlockM, kD>(rows + kBlockM * kD, operand_rows<const T>(params.dout, b, h, row),
                           params.dout.stride_s, p.S_q - row, p.D_v, args.vectorized);
    // Rows past S_q have q = dout = 0: with lse = delta = 0 they add nothing.
    const uint32_t target = smem_address(sStats + stage * 2 * kBlockM);
    for (int e = threadIdx.x; e < 2 * kBlockM; e += kMmaThreads) {
      const int r = e % kBlockM;
      const bool inside = row + r < p.S_q;
      const int64_t offset = e / kBlockM * all_rows + (b * p.H + h) * p.S_q + row + r;
      cp_async<4>(target + e * 4, stats + (inside ? offset : 0), inside ? 4 : 0);
    }
  };
  auto compute = [&](int64_t, int stage) {
    const auto [h, row0] = computed;
    step(computed);
    const uint32_t q_base = smem_address(sRows + stage * 2 * kBlockM * kD);
    const uint32_t dout_base = q_base + kBlockM * kD * 2;
    const float* lse = sStats + stage * 2 * kBlockM;
    const float* delta = lse + kBlockM;
    float s[kTiles][kCols][4], dp[kTiles][kCols][4];  // (keys, queries)
    clear(s);
    multiply_rows<T, kD>(s, smem_address(sK), warp_col, q_base);
    if constexpr (kWantDk) {
      clear(dp);
      multiply_rows<T, kD>(dp, smem_address(sV), warp_col, dout_base);
    }
    // Keys past S_k only change rows that are not stored, so only the causal rule hides here.
    const bool has_hidden = p.is_causal && col0 + kBlockN > row0 + 1;
    grad_scores<T, true, kHasExtras, kWantDk>(
        p, args, s, dp, b, h, col0 + warp_col, row0, has_hidden,
        [&](int, int n, int e) { return lse[fragment_col(n, e)]; },
        [&](int, int n, int e) { return delta[fragment_col(n, e)]; });
    if constexpr (kWantDv) multiply_weighted<T, kD>(dv, s, dout_base);
    if constexpr (kWantDk) multiply_weighted<T, kD>(dk, dp, q_base);
  };
  walk_tiles<Tile::kStages>(row_tiles > 0 ? row_tiles * group : 0, issue, compute);

  float scale[kTiles][2];
  if constexpr (kWantDk) {
    if (params.dk.data != nullptr) {
      fill_scale(scale, p.scale);
      store_rows(dk, operand_rows<T>(params.dk, b, h_kv, col0 + warp_col), params.dk.stride_s,
                 cols - warp_col, p.D, scale, args.pair_stores);
    }
  }
  if constexpr (kWantDv) {
    if (params.dv.data != nullptr) {
      fill_scale(scale, args.keep_scale);
      store_rows(dv, operand_rows<T>(params.dv, b, h_kv, col0 + warp_col), params.dv.stride_s,
                 cols - warp_col, p.D_v, scale, args.pair_stores);
    }
  }
}

template <class T, class Tile, bool kHasExtras>
void launch_dq_tile(const AttentionBackwardParams& p, const AttentionMmaArgs& args,
                    cudaStream_t stream) {
  const int64_t ctas = p.fwd.B * p.fwd.H * ceil_div(p.fwd.S_q, int64_t(Tile::kBlockM));
  launch(attention_bwd_dq_mma_kernel<T, Tile, kHasExtras>, dim3(static_cast<unsigned>(ctas)),
         dim3(kMmaThreads), Tile::kSmem, stream, p, args);
}

template <class T, class Tile, bool kWantDk, bool kWantDv, bool kHasExtras>
void launch_dkdv_tile(const AttentionBackwardParams& p, const AttentionMmaArgs& args,
                      cudaStream_t stream) {
  const int64_t ctas = p.fwd.B * p.fwd.H_kv * ceil_div(p.fwd.S_k, int64_t(Tile::kBlockN));
  launch(attention_bwd_dkdv_mma_kernel<T, Tile, kWantDk, kWantDv, kHasExtras>,
         dim3(static_cast<unsigned>(ctas)), dim3(kMmaThreads), Tile::kSmem, stream, p, args);
}

}  // namespace warpwright
