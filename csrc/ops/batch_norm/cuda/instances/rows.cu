// Instances: rows, two passes.
#include "ops/batch_norm/cuda/rows.cuh"

namespace warpwright {

template void launch_rows<false>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_rows<false>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                 cudaStream_t);

}  // namespace warpwright
