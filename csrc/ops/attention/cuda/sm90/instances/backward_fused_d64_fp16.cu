// Instances: fp16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/backward_fused.cuh"

namespace warpwright {

template bool launch_attention_bwd_fused_sm90<half, 64>(const AttentionBackwardParams&,
                                                        const GangSchedule&,
                                                        const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
