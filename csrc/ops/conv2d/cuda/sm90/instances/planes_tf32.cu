// D of the sm_90a convolutions in planes, TF32.
#include "ops/conv2d/cuda/sm90/launch_planes.cuh"

namespace warpwright {

template void launch_tma_im2col_planes<float>(const Conv2dShape& shape,
                                              const TmaIm2colConfig& config, const void* pixels,
                                              const void* weight, const void* bias, void* d,
                                              cudaStream_t stream);

}  // namespace warpwright
