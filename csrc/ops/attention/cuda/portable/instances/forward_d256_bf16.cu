// Instances: bf16, head dimensions up to 256.
#include "ops/attention/cuda/portable/forward_mma.cuh"

namespace warpwright {

template <>
void launch_attention_fwd_mma<bf16, 256>(const AttentionParams& p, const AttentionMmaArgs& args,
                                         cudaStream_t stream) {
  if (args.has_extras)
    launch_fwd_tile<bf16, AttentionFwdTile<256, 1, 32>, true>(p, args, stream);
  else
    launch_fwd_tile<bf16, AttentionFwdTile<256, 1, 64>, false>(p, args, stream);
}

}  // namespace warpwright
