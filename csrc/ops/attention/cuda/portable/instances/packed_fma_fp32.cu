// Instances: packed sequences on FMA units, fp32.
#include "ops/attention/cuda/portable/fma_backward.cuh"
#include "ops/attention/cuda/portable/fma_forward.cuh"

namespace warpwright {

template void launch_attention_fwd_packed_fma<float>(const AttentionParams&,
                                                     const SequenceTileList&, cudaStream_t);
template void launch_attention_bwd_packed_fma<float>(const AttentionBackwardParams&,
                                                     const SequenceTileList&,
                                                     const SequenceTileList&, cudaStream_t);

}  // namespace warpwright
