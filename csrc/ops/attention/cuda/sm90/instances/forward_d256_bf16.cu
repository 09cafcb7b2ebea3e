// Instances: bf16, head dimensions up to 256.
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template void launch_attention_fwd_sm90<bf16, 256>(const AttentionParams&, const AttentionPlan&,
                                                   const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
