// Instances: bf16, head dimensions up to 128.
#include "ops/attention/cuda/sm90/backward.cuh"

namespace warpwright {

template void launch_attention_bwd_sm90<bf16, 128>(const AttentionBackwardParams&,
                                                   const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
