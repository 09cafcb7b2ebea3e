// The depthwise kernels on tensor cores, of bfloat16.
#include "ops/conv2d/cuda/depthwise/columns_launch.cuh"

namespace warpwright {

template void launch_depthwise_columns_fprop<bf16>(const Conv2dParams&,
                                                   const DepthwiseColumnsConfig&, cudaStream_t);
template void launch_depthwise_columns_wgrad<bf16>(const Conv2dBackwardParams&,
                                                   const DepthwiseColumnsConfig&, void*,
                                                   cudaStream_t);

}  // namespace warpwright
