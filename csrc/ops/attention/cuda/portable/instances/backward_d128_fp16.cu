// Instances: fp16, head dimensions up to 128.
#include "ops/attention/cuda/portable/backward_mma.cuh"

namespace warpwright {

template <>
void launch_attention_bwd_dq_mma<half, 128>(const AttentionBackwardParams& p,
                                            const AttentionMmaArgs& args, cudaStream_t stream) {
  if (args.has_extras)
    launch_dq_tile<half, AttentionDqTile<128, 1, 64, 2>, true>(p, args, stream);
  else
    launch_dq_tile<half, AttentionDqTile<128, 2, 32, 2>, false>(p, args, stream);
}

template <>
void launch_attention_bwd_dkdv_mma<half, 128>(const AttentionBackwardParams& p,
                                              const AttentionMmaArgs& args, cudaStream_t stream) {
  if (args.has_extras)
    launch_dkdv_tile<half, AttentionDkDvTile<128, 1, 32, 2>, true, true, true>(p, args, stream);
  else
    launch_dkdv_tile<half, AttentionDkDvTile<128, 1, 64, 2>, true, true, false>(p, args, stream);
}

}  // namespace warpwright
