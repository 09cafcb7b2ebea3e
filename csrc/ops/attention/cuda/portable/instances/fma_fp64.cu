// Instances of the FMA kernels: fp64.
#include "ops/attention/cuda/portable/fma_backward.cuh"
#include "ops/attention/cuda/portable/fma_forward.cuh"

namespace warpwright {

template void launch_attention_fwd_fma<double>(const AttentionParams&, cudaStream_t);
template void launch_attention_bwd_fma<double>(const AttentionBackwardParams&, cudaStream_t);
template void launch_attention_bwd_mask<double>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace warpwright
