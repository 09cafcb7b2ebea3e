// The sm_90a convolutions of float16.
#include "ops/conv2d/cuda/sm90/launch.cuh"

namespace warpwright {

template void launch_tma_im2col_fprop<half>(const Conv2dParams&, const TmaIm2colConfig&,
                                            cudaStream_t);
template void launch_tma_im2col_dgrad<half>(const Conv2dBackwardParams&, const TmaIm2colConfig&,
                                            cudaStream_t);
template void launch_tma_im2col_wgrad<half>(const Conv2dBackwardParams&, const TmaIm2colConfig&,
                                            void*, cudaStream_t);

}  // namespace warpwright
