// Batch norm: channels innermost.
#include "ops/batchnorm/batchnorm_rows.cuh"

namespace warpwright {

template void launch_rows<false>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_rows<false>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                 cudaStream_t);

}  // namespace warpwright
