// Instances: rows on chip.
#include "ops/batch_norm/cuda/rows_on_chip.cuh"

namespace warpwright {

template bool launch_rows_on_chip<false>(const BatchNormParams&, const BatchNormPlan&, void*,
                                         cudaStream_t);
template bool launch_rows_on_chip<false>(const BatchNormBackwardParams&, const BatchNormPlan&,
                                         void*, cudaStream_t);

}  // namespace warpwright
