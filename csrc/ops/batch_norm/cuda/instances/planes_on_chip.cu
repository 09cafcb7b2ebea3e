// Instances: planes on chip.
#include "ops/batch_norm/cuda/planes_on_chip.cuh"

namespace warpwright {

template void launch_on_chip<false>(const BatchNormParams&, const BatchNormPlan&, cudaStream_t);
template void launch_on_chip<false>(const BatchNormBackwardParams&, const BatchNormPlan&,
                                    cudaStream_t);

}  // namespace warpwright
