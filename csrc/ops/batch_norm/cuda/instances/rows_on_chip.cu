// Instances: rows on chip.
#include "ops/batch_norm/cuda/rows_on_chip.cuh"

namespace warpwright {

template bool launch_rows_on_chip<false>(const BatchNormParams&, const BatchNormConfig&,
                                         cudaStream_t);
template bool launch_rows_on_chip<false>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                         cudaStream_t);

}  // namespace warpwright
