// The sm_90a convolutions of bfloat16.
#include "ops/conv2d/cuda/sm90/launch.cuh"

namespace warpwright {

template void launch_tma_im2col_fprop<bf16>(const Conv2dParams&, const TmaIm2colConfig&,
                                            cudaStream_t);
template void launch_tma_im2col_dgrad<bf16>(const Conv2dBackwardParams&, const TmaIm2colConfig&,
                                            cudaStream_t);
template void launch_tma_im2col_wgrad<bf16>(const Conv2dBackwardParams&, const TmaIm2colConfig&,
                                            void*, cudaStream_t);

}  // namespace warpwright
