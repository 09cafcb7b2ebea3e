// The input gradients that add an addend, float16.
#include "ops/conv2d/cuda/sm90/join.cuh"

namespace warpwright {

template void launch_joined_dgrad<half>(const Conv2dBackwardParams&, const JoinedDgradConfig&,
                                        cudaStream_t);

}  // namespace warpwright
