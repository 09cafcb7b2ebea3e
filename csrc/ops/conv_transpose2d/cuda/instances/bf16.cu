// The sm_90a product with depth to space, bfloat16.
#include "ops/conv_transpose2d/cuda/depth_to_space_sm90.cuh"

namespace warpwright {

template void launch_depth_to_space<bf16>(const ConvTranspose2dParams&, const DepthToSpaceConfig&,
                                          cudaStream_t);

}  // namespace warpwright
