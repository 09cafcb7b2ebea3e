// Instances: packed sequences, fp16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/with_sequences.cuh"

namespace warpwright {

template void launch_packed_fwd_sm90<half, 64>(const AttentionParams&, const PackedCallSm90&,
                                               cudaStream_t);

}  // namespace warpwright
