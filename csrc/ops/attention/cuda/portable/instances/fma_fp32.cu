// Instances of the FMA kernels: fp32.
#include "ops/attention/cuda/portable/fma_backward.cuh"
#include "ops/attention/cuda/portable/fma_forward.cuh"

namespace warpwright {

template void launch_attention_fwd_fma<float>(const AttentionParams&, cudaStream_t);
template void launch_attention_bwd_fma<float>(const AttentionBackwardParams&, cudaStream_t);
template void launch_attention_bwd_mask<float>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace warpwright
