// The sm_90a convolutions that take moments, bfloat16.
#include "ops/conv2d_batch_norm/cuda/product.cuh"

namespace warpwright {

template void launch_moments_product<bf16>(const Conv2dParams&, const Conv2dMomentsPlan&, void*,
                                           cudaStream_t);

}  // namespace warpwright
