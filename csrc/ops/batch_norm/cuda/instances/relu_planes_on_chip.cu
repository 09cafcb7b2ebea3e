// Instances with relu: planes on chip.
#include "ops/batch_norm/cuda/planes_on_chip.cuh"

namespace warpwright {

template void launch_on_chip<true>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_on_chip<true>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                   cudaStream_t);

}  // namespace warpwright
