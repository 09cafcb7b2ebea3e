// The forward on tensor cores (mma.sync, sm_80 and later), after FlashAttention-2's schedule (Dao
// 2023). A CTA owns a tile of queries and walks the keys. K of the next tile is in flight during
// softmax and P V, V of this tile during Q K^T. P never leaves registers.
#pragma once

#include "ops/attention/cuda/portable/mma.cuh"

namespace warpwright {

// kTiles: 16-row tiles per warp. Two halve the shared-memory reads of K and V per product.
template <int kD_, int kTiles_, int kBlockN_>
struct AttentionFwdTile {
  static constexpr int kD = kD_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kBlockM = 64 * kTiles_;  // queries, over 4 warps
  static constexpr int kBlockN = kBlockN_;      // keys
  static constexpr int kSmem = (kBlockM + 2 * kBlockN) * kD * 2;
};

// One tile's step of the online softmax: s (in units of log2 after multiplication by `scale`)
// becomes P. row_sum is a partial sum over this thread's columns. The base cancels in the end, so
// any base near the maximum serves. out and row_sum move to a new base only if P would exceed
// 2^kHeadroom, which few tiles do; fp16 holds 2^15.
template <int kTiles, int kCols, int kOutCols>
__device__ __forceinline__ void online_softmax(float (&s)[kTiles][kCols][4],
                                               float (&out)[kTiles][kOutCols][4],
                                               float (&row_max)[kTiles][2],
                                               float (&row_sum)[kTiles][2], float scale) {
  constexpr float kHeadroom = 6.f;
  float new_max[kTiles][2];
  bool moves = false;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = row_max[i][half];
#pragma unroll
      for (int n = 0; n < kCols; ++n)
        tile_max = fmaxf(tile_max, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
      // The four lanes of a row. A NaN score is ignored here and makes the sum below NaN.
      tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, 2));
      // Any base replaces -inf. With nothing visible yet, -inf - -inf is NaN, which compares false.
      moves |= (tile_max - row_max[i][half]) * scale > kHeadroom;
      new_max[i][half] = tile_max;
    }
  if (__any_sync(kFullMask, moves)) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = new_max[i][half] == -INFINITY ? 0.f : new_max[i][half] * scale;
        const float correction = ex2_approx(row_max[i][half] * scale - base);
        row_max[i][half] = new_max[i][half];
        row_sum[i][half] *= correction;
#pragma unroll
        for (int n = 0; n < kOutCols; ++n) {
          out[i][n][2 * half] *= correction;
          out[i][n][2 * half + 1] *= correction;
        }
      }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row with nothing visible yet: 2^(-inf - 0) = 0; -inf - -inf would be NaN.
      const float base = row_max[i][half] == -INFINITY ? 0.f : row_max[i][half] * scale;
#pragma unroll
      for (int n = 0; n < kCols; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& value = s[i][n][2 * half + x];
          value = ex2_approx(fmaf(value, scale, -base));
          row_sum[i][half] += value;
        }
    }
}

// q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), out (B, H, S_q, D_v)
// shared: Q (kBlockM, kD), K (kBlockN, kD), V (kBlockN, kD); warp w owns rows 16 kTiles w and
// following
// grid.x = (B * H, query tiles in reverse: under the causal rule the last is the longest)
template <class T, class Tile, bool kHasExtras>
__global__ void __launch_bounds__(kMmaThreads)
    attention_fwd_mma_kernel(const __grid_constant__ AttentionParams p,
                             const __grid_constant__ AttentionMmaArgs args) {
  constexpr int kD = Tile::kD, kTiles = Tile::kTiles, kBlockM = Tile::kBlockM;
  constexpr int kBlockN = Tile::kBlockN, kCols = kBlockN / 8;
  T* sQ = reinterpret_cast<T*>(attention_smem);
  T* sK = sQ + kBlockM * kD;
  T* sV = sK + kBlockN * kD;
  const uint32_t q_base = smem_address(sQ), k_base = smem_address(sK), v_base = smem_address(sV);

  const int64_t tiles = ceil_div(p.S_q, int64_t(kBlockM));
  const int64_t bh = blockIdx.x / tiles, b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int64_t row0 = (tiles - 1 - blockIdx.x % tiles) * kBlockM;
  const int64_t rows = min(int64_t(kBlockM), p.S_q - row0);
  const int warp_row = threadIdx.x / kWarpSize * 16 * kTiles;
  const float scale_log2 = static_cast<float>(p.scale) * kLog2E;
  const bool dropout = kHasExtras && p.philox_state != nullptr;
  const DropoutKey key =
      dropout ? load_dropout_key(p, args.dropout_threshold) : DropoutKey(0, 0, 0);

  const auto [first_key, keys] = key_blocks<kHasExtras, kBlockN>(p, row0, row0 + rows);
  auto load_keys = [&](const AttentionOperand& x, T* tile, int64_t col, int64_t cols) {
    load_tile<kBlockN, kD>(tile, operand_rows<const T>(x, b, h_kv, col), x.stride_s, p.S_k - col,
                           cols, args.vectorized);
    cp_async_commit();
  };
  load_tile<kBlockM, kD>(sQ, operand_rows<const T>(p.q, b, h, row0), p.q.stride_s, rows, p.D,
                         args.vectorized);
  if (keys > first_key) load_keys(p.k, sK, first_key, p.D);

  float out[kTiles][kD / 8][4];
  clear(out);
  float row_max[kTiles][2], row_sum[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[i][half] = -INFINITY, row_sum[i][half] = 0.f;

  for (int64_t col0 = first_key; col0 < keys; col0 += kBlockN) {
    cp_async_wait<0>();
    __syncthreads();  // K has arrived, and every warp has finished with V
    load_keys(p.v, sV, col0, p.D_v);
    float s[kTiles][kCols][4];
    clear(s);
    multiply_rows<T, kD>(s, q_base, warp_row, k_base);
    if constexpr (kHasExtras) add_mask<T, false>(p, s, b, h, row0 + warp_row, col0, scale_log2);
    if (col0 + kBlockN > p.S_k || (p.is_causal && col0 + kBlockN > row0 + 1) ||
        (kHasExtras && is_windowed(p)))
      hide<false, kHasExtras>(p, s, row0 + warp_row, col0);
    cp_async_wait<0>();
    __syncthreads();  // V has arrived, and every warp has finished with K
    if (col0 + kBlockN < keys) load_keys(p.k, sK, col0 + kBlockN, p.D);

    online_softmax(s, out, row_max, row_sum, kHasExtras ? 1.f : scale_log2);
    if constexpr (kHasExtras) {
      if (dropout) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int pair = 0; pair < kCols / 2; ++pair)
            for_dropped<false>(key, bh, row0 + warp_row + 16 * i, col0 + 16 * pair,
                               [&](int n, int e) { s[i][2 * pair + n][e] = 0.f; });
      }
    }
    multiply_weighted<T, kD>(out, s, v_base);
  }
  cp_async_wait<0>();

  const float log2_scale = kHasExtras ? 1.f : scale_log2;
  float* lse = static_cast<float*>(p.lse) + bh * p.S_q + row0 + warp_row;
  float inverse[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_reduce<4>(row_sum[i][half], Sum());
      const bool hidden = sum == 0.f;
      inverse[i][half] = hidden ? 0.f : args.keep_scale / sum;
      if (hidden) {  // 0 for any V
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) out[i][n][2 * half] = out[i][n][2 * half + 1] = 0.f;
      }
      const int row = fragment_row(i, 2 * half);
      if (threadIdx.x % 4 == 0 && warp_row + row < rows)
        lse[row] = hidden ? -INFINITY : row_max[i][half] * log2_scale / kLog2E + logf(sum);
    }
  store_rows(out, operand_rows<T>(p.out, b, h, row0 + warp_row), p.out.stride_s, rows - warp_row,
             p.D_v, inverse, args.pair_stores);
}

template <class T, class Tile, bool kHasExtras>
void launch_fwd_tile(const AttentionParams& p, const AttentionMmaArgs& args, cudaStream_t stream) {
  const int64_t ctas = p.B * p.H * ceil_div(p.S_q, int64_t(Tile::kBlockM));
  launch(attention_fwd_mma_kernel<T, Tile, kHasExtras>, dim3(static_cast<unsigned>(ctas)),
         dim3(kMmaThreads), Tile::kSmem, stream, p, args);
}

}  // namespace warpwright
