// The 1 x 1 convolutions in NCHW in TF32.
#include "ops/conv2d/cuda/sm90/plane_product_tf32.cuh"

namespace warpwright {

template <>
void launch_plane_product<float>(const Conv2dShape& s, const PlaneProductConfig& config,
                                 const void* planes, const void* weight, const void* bias, void* d,
                                 cudaStream_t stream) {
  launch_plane_product_tf32(s, config, planes, weight, bias, d, stream);
}
template void launch_plane_product_wgrad<float>(const Conv2dBackwardParams&,
                                                const PlaneProductConfig&, void*, cudaStream_t);

}  // namespace warpwright
