// Instances: packed sequences, fp16, head dimensions up to 128.
#include "ops/attention/cuda/sm90/with_sequences.cuh"

namespace warpwright {

template void launch_packed_bwd_sm90<half, 128>(const AttentionBackwardParams&,
                                                const PackedCallSm90&, cudaStream_t);

}  // namespace warpwright
