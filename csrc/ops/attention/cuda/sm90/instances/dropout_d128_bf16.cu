// Instances: dropout, bf16, head dimensions 65 to 128.
#include "ops/attention/cuda/sm90/with_dropout.cuh"

namespace warpwright {

template void launch_attention_fwd_dropout_sm90<bf16, 128>(const AttentionParams&,
                                                           const AttentionWorkspace&, cudaStream_t);
template void launch_attention_bwd_dropout_sm90<bf16, 128>(const AttentionBackwardParams&,
                                                           const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
