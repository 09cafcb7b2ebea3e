// Instances with relu: rows, two passes.
#include "ops/batch_norm/cuda/rows.cuh"

namespace warpwright {

template void launch_rows<true>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_rows<true>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                cudaStream_t);

}  // namespace warpwright
