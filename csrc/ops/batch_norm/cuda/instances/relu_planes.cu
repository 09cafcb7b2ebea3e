// Instances with relu: planes, two passes.
#include "ops/batch_norm/cuda/planes.cuh"

namespace warpwright {

template void launch_planes<true>(const BatchNormParams&, const BatchNormPlan&, void*,
                                  cudaStream_t);
template void launch_planes<true>(const BatchNormBackwardParams&, const BatchNormPlan&, void*,
                                  cudaStream_t);

}  // namespace warpwright
