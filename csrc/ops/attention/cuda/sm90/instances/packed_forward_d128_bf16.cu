// Instances: packed sequences, bf16, head dimensions up to 128.
#include "ops/attention/cuda/sm90/with_sequences.cuh"

namespace warpwright {

template void launch_packed_fwd_sm90<bf16, 128>(const AttentionParams&, const PackedCallSm90&,
                                                cudaStream_t);

}  // namespace warpwright
