// Instances: fp16, head dimensions up to 256.
#include "ops/attention/cuda/sm90/backward.cuh"

namespace warpwright {

template void launch_attention_bwd_sm90<half, 256>(const AttentionBackwardParams&,
                                                   const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
