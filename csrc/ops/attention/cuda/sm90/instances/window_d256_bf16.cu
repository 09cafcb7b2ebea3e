// Instances: a window of keys and softcap, bf16, head dimensions up to 256.
#include "ops/attention/cuda/sm90/with_window.cuh"

namespace warpwright {

template void launch_attention_fwd_window_sm90<bf16, 256>(const AttentionParams&,
                                                          const AttentionPlan&,
                                                          const AttentionWorkspace&, cudaStream_t);
template void launch_attention_bwd_window_sm90<bf16, 256>(const AttentionBackwardParams&,
                                                          const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
