// The launchers with dropout on sm_90a. One instance serves both kinds of masks. Tiles have 128
// queries: with dropout, tiles of 192 are no faster on any shape raced.
#pragma once

#include "ops/attention/cuda/sm90/backward.cuh"
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template <class T, int kHead>
void launch_attention_fwd_dropout_sm90(const AttentionParams& p,
                                       const AttentionWorkspace& workspace, cudaStream_t stream) {
  for_mask_or_none(p, [&]<MaskUse kMask>() {
    using Tile = ForwardTileSm90<kHead, 128, 2, true, kMask, /*kDropout=*/true>;
    launch_forward<T, Tile>(p, workspace, stream);
  });
}

template <class T, int kHead>
void launch_attention_bwd_dropout_sm90(const AttentionBackwardParams& p,
                                       const AttentionWorkspace& workspace, cudaStream_t stream) {
  for_mask_or_none(p.fwd, [&]<MaskUse kMask>() {
    launch_backward<T, kHead, kMask, /*kDropout=*/true>(p, workspace, stream);
  });
}

}  // namespace warpwright
