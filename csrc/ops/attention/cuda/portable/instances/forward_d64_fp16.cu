// Instances: fp16, head dimensions up to 64.
#include "ops/attention/cuda/portable/forward_mma.cuh"

namespace warpwright {

template <>
void launch_attention_fwd_mma<half, 64>(const AttentionParams& p, const AttentionMmaArgs& args,
                                        cudaStream_t stream) {
  if (args.has_extras)
    launch_fwd_tile<half, AttentionFwdTile<64, 2, 64>, true>(p, args, stream);
  else
    launch_fwd_tile<half, AttentionFwdTile<64, 2, 128>, false>(p, args, stream);
}

}  // namespace warpwright
