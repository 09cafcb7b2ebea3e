// Instances with relu: planes, two passes.
#include "ops/batch_norm/cuda/planes.cuh"

namespace warpwright {

template void launch_planes<true>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_planes<true>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                  cudaStream_t);

}  // namespace warpwright
