// The 1 x 1 convolutions in NCHW of float16.
#include "ops/conv2d/cuda/sm90/plane_product.cuh"

namespace warpwright {

template void launch_plane_product<half>(const Conv2dShape&, const PlaneProductConfig&, const void*,
                                         const void*, const void*, void*, cudaStream_t);
template void launch_plane_product_wgrad<half>(const Conv2dBackwardParams&,
                                               const PlaneProductConfig&, void*, cudaStream_t);

}  // namespace warpwright
