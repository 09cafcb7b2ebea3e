// Instances of the FMA kernels: bf16.
#include "ops/attention/cuda/portable/fma_backward.cuh"
#include "ops/attention/cuda/portable/fma_forward.cuh"

namespace warpwright {

template void launch_attention_fwd_fma<bf16>(const AttentionParams&, cudaStream_t);
template void launch_attention_bwd_fma<bf16>(const AttentionBackwardParams&, cudaStream_t);
template void launch_attention_bwd_mask<bf16>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace warpwright
