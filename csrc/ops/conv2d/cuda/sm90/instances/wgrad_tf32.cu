// The sm_90a convolutions in TF32: the gradient of w.
#include "ops/conv2d/cuda/sm90/launch.cuh"

namespace warpwright {

template void launch_tma_im2col_wgrad<float>(const Conv2dBackwardParams&, const TmaIm2colConfig&,
                                             void*, cudaStream_t);

}  // namespace warpwright
