// The sm_90a convolutions that take moments, float16.
#include "ops/conv2d_batch_norm/cuda/product.cuh"

namespace warpwright {

template void launch_moments_product<half>(const Conv2dParams&, const Conv2dMomentsPlan&, void*,
                                           cudaStream_t);

}  // namespace warpwright
