// The 1 x 1 convolutions in NCHW of bfloat16.
#include "ops/conv2d/cuda/sm90/plane_product.cuh"

namespace warpwright {

template void launch_plane_product<bf16>(const Conv2dShape&, const PlaneProductConfig&, const void*,
                                         const void*, const void*, void*, cudaStream_t);
template void launch_plane_product_wgrad<bf16>(const Conv2dBackwardParams&,
                                               const PlaneProductConfig&, void*, cudaStream_t);

}  // namespace warpwright
