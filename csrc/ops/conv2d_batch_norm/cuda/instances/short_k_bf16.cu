// The products of bfloat16 with a short k that take moments.
#include "ops/conv2d_batch_norm/cuda/short_k.cuh"

namespace warpwright {

template void launch_short_k_moments<bf16>(const GemmParams&, const GemmPlan&, MomentsRecord*,
                                           float2*, int64_t, cudaStream_t);

}  // namespace warpwright
