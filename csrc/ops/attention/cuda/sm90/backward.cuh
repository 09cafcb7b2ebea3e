// The two kernels of the backward on sm_90a, after the statistics and the classes of a mask.
#pragma once

#include <type_traits>

#include "ops/attention/cuda/sm90/backward_dkdv.cuh"
#include "ops/attention/cuda/sm90/backward_dq.cuh"

namespace warpwright {

template <class T, int kHead, MaskUse kMask, bool kDropout>
void launch_backward(const AttentionBackwardParams& p, const AttentionWorkspace& workspace,
                     cudaStream_t stream) {
  constexpr bool kNarrow = kHead == 64;
  using Dq = std::conditional_t<kNarrow, DqTileSm90<64, 128, 3, 2, kMask, kDropout>,
                                DqTileSm90<128, 96, 2, 2, kMask, kDropout>>;
  using Dkdv = std::conditional_t<kNarrow, DkdvTileSm90<64, 4, 2, kMask, kDropout>,
                                  DkdvTileSm90<128, 2, 2, kMask, kDropout>>;
  if constexpr (Dq::kMasked)
    launch_mask_tiles(p.fwd, {Dq::kConsumers, Dq::kBlockN}, /*backward=*/true, workspace, stream);
  launch_attention_row_stats_sm90(p, workspace.tile_counters, stream);
  if (p.dq.data != nullptr) launch_dq<T, Dq>(p, workspace, stream);
  if (p.dk.data != nullptr || p.dv.data != nullptr) launch_dkdv<T, Dkdv>(p, workspace, stream);
}

template <class T, int kHead>
void launch_attention_bwd_sm90(const AttentionBackwardParams& p,
                               const AttentionWorkspace& workspace, cudaStream_t stream) {
  for_mask_use(p.fwd, [&]<MaskUse kMask>() {
    launch_backward<T, kHead, kMask, /*kDropout=*/false>(p, workspace, stream);
  });
}

}  // namespace warpwright
