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

// Hides columns before a limit: `first` is the first visible column of the thread's upper row,
// counted from the tile's first. That of the lower row is 8 more.
template <int kRegs>
__device__ __forceinline__ void hide_columns_before(float (&s)[kRegs], int first) {
  const int limit = first - accumulator_col();
#pragma unroll
  for (int i = 0; i < kRegs; ++i)
    if (i / 4 * 8 + i % 2 - i / 2 % 2 * 8 < limit) s[i] = -INFINITY;
}

// Hides the columns of a warp's scores outside of the window. The visible ones are `first` to
// `last` in the warp's first row, one further in each following row, and none past `end`. Few tiles
// cross both limits of a window, so each limit is applied alone.
template <int kRegs>
__device__ __forceinline__ void hide_outside(float (&s)[kRegs], int first, int last, int end) {
  const int row = accumulator_row() - accumulator_warp_row();
  if (last < kRegs * 2 - 1 || end < kRegs * 2 - 1) {
    const int limit[2] = {min(last + row, end), min(last + row + 8, end)};
    hide_columns(s, limit);
  }
  if (first + 15 > 0) hide_columns_before(s, first + row);
}

// hide_ends() with a window: applies the softcap, then hides keys outside the window and past S_k.
template <class Params, int kRegs>
  requires requires(const Params& p) { p.window; }
__device__ __forceinline__ void hide_ends(float (&s)[kRegs], int row0, int col0, const Params& p) {
  const AttentionWindowSm90& w = p.window;
  cap_scores(s, w);
  const int row = row0 + accumulator_warp_row() - col0;
  hide_outside(s, row - w.left, row + w.right, p.S_k - 1 - col0);
}

// The same with keys as rows, from col0 on, and queries as columns, from row0 on. Also hides
// queries past S_q, whose scores with an infinite key would be NaN. Keys past S_k are not stored.
template <int kRegs>
__device__ __forceinline__ void hide_queries(float (&s)[kRegs], const AttentionWindowSm90& w,
                                             int col0, int row0, int S_q) {
  const int key = col0 + accumulator_warp_row() - row0;
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
