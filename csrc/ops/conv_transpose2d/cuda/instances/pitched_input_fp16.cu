// The gradient of x from a pitched gradient, float16.
#include "ops/conv_transpose2d/cuda/pitched_sm90.cuh"

namespace warpwright {

template void launch_pitched_input_gradient<half>(const ConvTranspose2dBackwardParams&,
                                                  const TmaIm2colConfig&, cudaStream_t);

}  // namespace warpwright
