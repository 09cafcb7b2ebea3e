// The launchers with a window of keys, a softcap or both on sm_90a. A tile of 128 queries walks
// fewer hidden keys at the window's edges than one of 192.
#pragma once

#include "ops/attention/cuda/sm90/backward.cuh"
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template <class T, int kHead>
void launch_attention_fwd_window_sm90(const AttentionParams& p, const AttentionWorkspace& workspace,
                                      cudaStream_t stream) {
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
