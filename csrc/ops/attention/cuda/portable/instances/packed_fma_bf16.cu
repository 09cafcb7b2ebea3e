// Instances: packed sequences on FMA units, bf16.
#include "ops/attention/cuda/portable/fma_backward.cuh"
#include "ops/attention/cuda/portable/fma_forward.cuh"

namespace warpwright {

template void launch_attention_fwd_packed_fma<bf16>(const AttentionParams&, const SequenceTileList&,
                                                    cudaStream_t);
template void launch_attention_bwd_packed_fma<bf16>(const AttentionBackwardParams&,
                                                    const SequenceTileList&,
                                                    const SequenceTileList&, cudaStream_t);

}  // namespace warpwright
