// Instances: fp16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template <>
void launch_attention_fwd_sm90<half, 64>(const AttentionParams& p,
                                         const AttentionWorkspace& workspace, cudaStream_t stream) {
  // Tiles of 192 queries read K and V less often. Few rows fill tiles of 128 better, and values of
  // a mask need the registers of two consumers.
  for_mask_use(p, [&]<MaskUse kMask>() {
    if constexpr (kMask != MaskUse::kValues) {
      if (p.S_q >= 2048)
        return launch_forward<half, ForwardTileSm90<64, 128, 3, true, kMask>>(p, workspace, stream);
    }
    launch_forward<half, ForwardTileSm90<64, 128, 2, true, kMask>>(p, workspace, stream);
  });
}

}  // namespace warpwright
