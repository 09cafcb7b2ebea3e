// The gradient of the weight from a pitched gradient, float16.
#include "ops/conv_transpose2d/cuda/pitched_sm90.cuh"

namespace warpwright {

template void launch_pitched_weight_gradient<half>(const ConvTranspose2dBackwardParams&,
                                                   const TmaIm2colConfig&, void*, cudaStream_t);

}  // namespace warpwright
