// The depthwise kernels that walk rows, of float32.
#include "ops/conv2d/cuda/depthwise/rows_launch.cuh"

namespace warpwright {

template void launch_depthwise_rows_fprop<float>(const Conv2dParams&, const DepthwiseRowsConfig&,
                                                 cudaStream_t);
template void launch_depthwise_rows_dgrad<float>(const Conv2dBackwardParams&,
                                                 const DepthwiseRowsConfig&, cudaStream_t);
template void launch_depthwise_rows_wgrad<float>(const Conv2dBackwardParams&,
                                                 const DepthwiseRowsConfig&, void*, cudaStream_t);

}  // namespace warpwright
