// Instances: fp16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/backward_dkdv.cuh"
#include "ops/attention/cuda/sm90/backward_dq.cuh"

namespace warpwright {

template <>
void launch_attention_bwd_sm90<half, 64>(const AttentionBackwardParams& p,
                                         const AttentionWorkspace& workspace, cudaStream_t stream) {
  for_mask_use(p.fwd, [&]<MaskUse kMask>() {
    using Dq = DqTileSm90<64, 128, 3, 2, kMask>;
    if constexpr (Dq::kMasked)
      launch_mask_tiles(p.fwd, {Dq::kConsumers, Dq::kBlockN}, /*backward=*/true, workspace, stream);
    launch_attention_row_stats_sm90(p, workspace.tile_counters, stream);
    if (p.dq.data != nullptr) launch_dq<half, Dq>(p, workspace, stream);
    if (p.dk.data != nullptr || p.dv.data != nullptr)
      launch_dkdv<half, DkdvTileSm90<64, 4, 2, kMask>>(p, workspace, stream);
  });
}

}  // namespace warpwright
