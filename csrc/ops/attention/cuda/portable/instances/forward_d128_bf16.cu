// Instances: bf16, head dimensions up to 128.
#include "ops/attention/cuda/portable/forward_mma.cuh"

namespace warpwright {

template <>
void launch_attention_fwd_mma<bf16, 128>(const AttentionParams& p, const AttentionMmaArgs& args,
                                         cudaStream_t stream) {
  if (args.has_extras)
    launch_fwd_tile<bf16, AttentionFwdTile<128, 1, 64>, true>(p, args, stream);
  else
    launch_fwd_tile<bf16, AttentionFwdTile<128, 2, 64>, false>(p, args, stream);
}

}  // namespace warpwright
