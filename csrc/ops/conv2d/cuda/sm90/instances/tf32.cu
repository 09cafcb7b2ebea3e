// The sm_90a convolutions in TF32: y and the gradient of x.
#include "ops/conv2d/cuda/sm90/launch.cuh"

namespace warpwright {

template void launch_tma_im2col_fprop<float>(const Conv2dParams&, const TmaIm2colConfig&,
                                             cudaStream_t);
template void launch_tma_im2col_dgrad<float>(const Conv2dBackwardParams&, const TmaIm2colConfig&,
                                             cudaStream_t);

}  // namespace warpwright
