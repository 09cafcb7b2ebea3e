// Instances: fp16, head dimensions up to 128.
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template <>
void launch_attention_fwd_sm90<half, 128>(const AttentionParams& p,
                                          const AttentionWorkspace& workspace,
                                          cudaStream_t stream) {
  for_mask_use(p, [&]<MaskUse kMask>() {
    launch_forward<half, ForwardTileSm90<128, 128, 2, true, kMask>>(p, workspace, stream);
  });
}

}  // namespace warpwright
