// The depthwise kernels on tensor cores, of float16.
#include "ops/conv2d/cuda/depthwise/columns_launch.cuh"

namespace warpwright {

template void launch_depthwise_columns_fprop<half>(const Conv2dParams&,
                                                   const DepthwiseColumnsConfig&, cudaStream_t);
template void launch_depthwise_columns_wgrad<half>(const Conv2dBackwardParams&,
                                                   const DepthwiseColumnsConfig&, void*,
                                                   cudaStream_t);

}  // namespace warpwright
