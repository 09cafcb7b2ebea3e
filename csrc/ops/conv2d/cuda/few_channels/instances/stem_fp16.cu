// The kernels of an image network's first convolution, of float16.
#include "ops/conv2d/cuda/few_channels/stem_launch.cuh"

namespace warpwright {

template void launch_stem_fprop<half>(const Conv2dParams&, const StemConfig&, cudaStream_t);
template void launch_stem_wgrad<half>(const Conv2dBackwardParams&, const StemConfig&, void*,
                                      cudaStream_t);

}  // namespace warpwright
