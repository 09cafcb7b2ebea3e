// Instances: bf16, head dimensions up to 128.
#include "ops/attention/cuda/sm90/backward_dkdv.cuh"
#include "ops/attention/cuda/sm90/backward_dq.cuh"

namespace warpwright {

template <>
void launch_attention_bwd_sm90<bf16, 128>(const AttentionBackwardParams& p,
                                          const AttentionWorkspace& workspace,
                                          cudaStream_t stream) {
  for_mask_use(p.fwd, [&]<MaskUse kMask>() {
    using Dq = DqTileSm90<128, 96, 2, 2, kMask>;
    if constexpr (Dq::kMasked)
      launch_mask_tiles(p.fwd, {Dq::kConsumers, Dq::kBlockN}, /*backward=*/true, workspace, stream);
    launch_attention_row_stats_sm90(p, workspace.tile_counters, stream);
    if (p.dq.data != nullptr) launch_dq<bf16, Dq>(p, workspace, stream);
    if (p.dk.data != nullptr || p.dv.data != nullptr)
      launch_dkdv<bf16, DkdvTileSm90<128, 2, 2, kMask>>(p, workspace, stream);
  });
}

}  // namespace warpwright
