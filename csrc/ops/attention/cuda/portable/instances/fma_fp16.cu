// Instances of the FMA kernels: fp16.
#include "ops/attention/cuda/portable/fma_backward.cuh"
#include "ops/attention/cuda/portable/fma_forward.cuh"

namespace warpwright {

template void launch_attention_fwd_fma<half>(const AttentionParams&, cudaStream_t);
template void launch_attention_bwd_fma<half>(const AttentionBackwardParams&, cudaStream_t);
template void launch_attention_bwd_mask<half>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace warpwright
