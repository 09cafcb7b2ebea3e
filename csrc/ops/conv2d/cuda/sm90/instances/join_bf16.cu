// The input gradients that add an addend, bfloat16.
#include "ops/conv2d/cuda/sm90/join.cuh"

namespace warpwright {

template void launch_joined_dgrad<bf16>(const Conv2dBackwardParams&, const JoinedDgradConfig&,
                                        cudaStream_t);

}  // namespace warpwright
