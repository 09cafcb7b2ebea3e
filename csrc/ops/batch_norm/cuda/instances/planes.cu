// Instances: planes, two passes.
#include "ops/batch_norm/cuda/planes.cuh"

namespace warpwright {

template void launch_planes<false>(const BatchNormParams&, const BatchNormPlan&, void*,
                                   cudaStream_t);
template void launch_planes<false>(const BatchNormBackwardParams&, const BatchNormPlan&, void*,
                                   cudaStream_t);

}  // namespace warpwright
