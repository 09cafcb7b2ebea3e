// A window of keys and the softcap inside the sm_90a kernels: which blocks a tile walks, what is
// hidden at their edges, and the scores and their derivative under softcap.
#pragma once

#include "ops/attention/cuda/common.cuh"
#include "ops/attention/cuda/sm90/params.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"

namespace warpwright {

// Neighbouring blocks, `count` from `first` on.
struct BlockRange {
  int first, count;
};

// The blocks of kBlock positions that hold [begin, end).
template <int kBlock>
__device__ __forceinline__ BlockRange blocks_of_range(int begin, int end) {
  const int first = begin / kBlock;
  return {first, end > begin ? (end + kBlock - 1) / kBlock - first : 0};
}
// Of the keys that queries [row0, row0 + rows) see, and of the queries that see keys [col0, col0 +
// cols).
template <int kBlock>
__device__ __forceinline__ BlockRange keys_in_window(const AttentionWindowSm90& w, int row0,
                                                     int rows, int S_k) {
  return blocks_of_range<kBlock>(max(0, row0 - w.left), min(S_k, row0 + rows + w.right));
}
template <int kBlock>
__device__ __forceinline__ BlockRange queries_in_window(const AttentionWindowSm90& w, int col0,
                                                        int cols, int S_q) {
  return blocks_of_range<kBlock>(max(0, col0 - w.right), min(S_q, col0 + cols + w.left));
}

// Products q k^T to tanh(scale * s / cap), with softcap. The caller's exponent has the factor cap.
template <int kRegs>
__device__ __forceinline__ void cap_scores(float (&s)[kRegs], const AttentionWindowSm90& w) {
  if (w.exponent == 0.f) return;
#pragma unroll
  for (int i = 0; i < kRegs; ++i) s[i] = tanh_from_log2(w.exponent * s[i]);
}

// Hides columns outside [first, last] of the thread's two rows, counted from the tile's first
// column. Both limits are of the upper row; those of the lower row are 8 more, but `end` is a limit
// of both.
template <int kRegs>
__device__ __forceinline__ void hide_outside(float (&s)[kRegs], int first, int last, int end) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = first + 8 * half - accumulator_col();
    const int to = min(last + 8 * half, end) - accumulator_col();
#pragma unroll
    for (int i = 2 * half; i < kRegs; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int col = i / 4 * 8 + e;
        if (col < from || col > to) s[i + e] = -INFINITY;
      }
  }
}

// hide_ends() with a window: applies the softcap, then hides keys outside the window and past S_k.
template <class Params, int kRegs>
  requires requires(const Params& p) { p.window; }
__device__ __forceinline__ void hide_ends(float (&s)[kRegs], int row0, int col0, const Params& p) {
  const AttentionWindowSm90& w = p.window;
  cap_scores(s, w);
  constexpr int kKeys = kRegs * 2;
  const int first_row = row0 + accumulator_warp_row();
  if (col0 >= first_row + 15 - w.left && col0 + kKeys - 1 <= first_row + w.right &&
      col0 + kKeys <= p.S_k)
    return;
  const int row = row0 + accumulator_row() - col0;
  hide_outside(s, row - w.left, row + w.right, p.S_k - 1 - col0);
}

// The same with keys as rows, from col0 on, and queries as columns, from row0 on. Also hides
// queries past S_q, whose scores with an infinite key would be NaN. Keys past S_k are not stored.
template <int kRegs>
__device__ __forceinline__ void hide_queries(float (&s)[kRegs], const AttentionWindowSm90& w,
                                             int col0, int row0, int S_q) {
  constexpr int kQueries = kRegs * 2;
  const int first_key = col0 + accumulator_warp_row();
  if (row0 >= first_key + 15 - w.right && row0 + kQueries - 1 <= first_key + w.left &&
      row0 + kQueries <= S_q)
    return;
  const int key = col0 + accumulator_row() - row0;
  hide_outside(s, key - w.right, key + w.left, S_q - 1 - row0);
}

// Probabilities to the factors of dP - delta in the gradient before softcap. lse: of the thread's
// two rows.
template <int kRegs>
__device__ __forceinline__ void uncap_rows(float (&s)[kRegs], const float (&lse)[2],
                                           const AttentionWindowSm90& w) {
  if (w.uncap == 0.f) return;
#pragma unroll
  for (int i = 0; i < kRegs; ++i) s[i] = uncapped(s[i], lse[i / 2 % 2], w.uncap);
}
// The same if queries are columns. lse: their row in shared memory.
template <int kRegs>
__device__ __forceinline__ void uncap_columns(float (&s)[kRegs], uint32_t lse,
                                              const AttentionWindowSm90& w) {
  if (w.uncap == 0.f) return;
#pragma unroll
  for (int i = 0; i < kRegs; i += 4) {
    const float2 of = load_pair(lse, i);
    s[i] = uncapped(s[i], of.x, w.uncap);
    s[i + 1] = uncapped(s[i + 1], of.y, w.uncap);
    s[i + 2] = uncapped(s[i + 2], of.x, w.uncap);
    s[i + 3] = uncapped(s[i + 3], of.y, w.uncap);
  }
}

}  // namespace warpwright
