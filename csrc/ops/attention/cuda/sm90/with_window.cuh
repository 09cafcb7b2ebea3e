// The launchers with a window of keys, a softcap or both on sm_90a.
#pragma once

#include "ops/attention/cuda/sm90/backward.cuh"
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template <class T, int kHead>
void launch_attention_fwd_window_sm90(const AttentionParams& p, const AttentionPlan& plan,
                                      const AttentionWorkspace& workspace, cudaStream_t stream) {
  if constexpr (kHead == 64) {
    if (plan.query_rows == 192)
      return launch_forward<T, ForwardTileSm90<64, 128, 3, true, MaskUse::kWindow>>(p, workspace,
                                                                                    stream);
  }
  constexpr bool kWide = kHead > 128;
  using Tile = ForwardTileSm90<kHead, kWide ? 64 : 128, 2, !kWide, MaskUse::kWindow>;
  launch_forward<T, Tile>(p, workspace, stream);
}

template <class T, int kHead>
void launch_attention_bwd_window_sm90(const AttentionBackwardParams& p,
                                      const AttentionWorkspace& workspace, cudaStream_t stream) {
  launch_backward<T, kHead, MaskUse::kWindow, /*kDropout=*/false>(p, workspace, stream);
}

}  // namespace warpwright
