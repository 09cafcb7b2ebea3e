// Instances: packed sequences, bf16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/with_sequences.cuh"

namespace warpwright {

template void launch_packed_bwd_sm90<bf16, 64>(const AttentionBackwardParams&,
                                               const PackedCallSm90&, cudaStream_t);

}  // namespace warpwright
