// Batch norm with a relu behind it: planes of a channel, two passes.
#include "ops/batchnorm/batchnorm_planes.cuh"

namespace warpwright {

template void launch_planes<true>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_planes<true>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                  cudaStream_t);

}  // namespace warpwright
