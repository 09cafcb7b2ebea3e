// The two kernels of the backward on sm_90a, after the statistics and the classes of a mask.
#pragma once

#include "ops/attention/cuda/sm90/backward_dkdv.cuh"
#include "ops/attention/cuda/sm90/backward_dkdv_roles.cuh"
#include "ops/attention/cuda/sm90/backward_dq.cuh"

namespace warpwright {

// The tiles of one padded head dimension.
template <int kHead, MaskUse kMask, bool kDropout>
struct BackwardTilesSm90;
template <MaskUse kMask, bool kDropout>
struct BackwardTilesSm90<64, kMask, kDropout> {
  using Dq = DqTileSm90<64, 128, 3, 3, 2, kMask, kDropout>;
  using Dkdv = DkdvTileSm90<64, 4, 2, kMask, kDropout>;
};
template <MaskUse kMask, bool kDropout>
struct BackwardTilesSm90<128, kMask, kDropout> {
  using Dq = DqTileSm90<128, 96, 2, 2, 2, kMask, kDropout>;
  using Dkdv = DkdvTileSm90<128, 2, 2, kMask, kDropout>;
};
template <MaskUse kMask>
struct BackwardTilesSm90<256, kMask, false> {
  using Dq = DqTileSm90<256, 64, 2, 1, 1, kMask>;
  using Dkdv = DkdvRolesTileSm90<256, 2, 1, kMask>;
};

template <class T, int kHead, MaskUse kMask, bool kDropout>
void launch_backward(const AttentionBackwardParams& p, const AttentionWorkspace& workspace,
                     cudaStream_t stream) {
  using Tiles = BackwardTilesSm90<kHead, kMask, kDropout>;
  using Dq = typename Tiles::Dq;
  using Dkdv = typename Tiles::Dkdv;
  if constexpr (Dq::kMasked)
    launch_mask_tiles(p.fwd, {Dq::kConsumers, Dq::kBlockN}, /*backward=*/true, workspace, stream);
  launch_attention_row_stats_sm90(p, workspace, stream);
  if (p.dq.data != nullptr) launch_dq<T, Dq>(p, workspace, stream);
  if (p.dk.data == nullptr && p.dv.data == nullptr) return;
  if constexpr (kHead > 128)
    launch_dkdv_roles<T, Dkdv>(p, workspace, stream);
  else
    launch_dkdv<T, Dkdv>(p, workspace, stream);
}

template <class T, int kHead>
void launch_attention_bwd_sm90(const AttentionBackwardParams& p,
                               const AttentionWorkspace& workspace, cudaStream_t stream) {
  for_mask_use(p.fwd, [&]<MaskUse kMask>() {
    launch_backward<T, kHead, kMask, /*kDropout=*/false>(p, workspace, stream);
  });
}

}  // namespace warpwright
