// The kernels of an image network's first convolution, of bfloat16.
#include "ops/conv2d/cuda/few_channels/stem_launch.cuh"

namespace warpwright {

template void launch_stem_fprop<bf16>(const Conv2dParams&, const StemConfig&, cudaStream_t);
template void launch_stem_wgrad<bf16>(const Conv2dBackwardParams&, const StemConfig&, void*,
                                      cudaStream_t);

}  // namespace warpwright
