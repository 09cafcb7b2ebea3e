// Batch norm with a relu behind it: channels innermost.
#include "ops/batchnorm/batchnorm_rows.cuh"

namespace warpwright {

template void launch_rows<true>(const BatchNormParams&, const BatchNormConfig&, cudaStream_t);
template void launch_rows<true>(const BatchNormBackwardParams&, const BatchNormConfig&,
                                cudaStream_t);

}  // namespace warpwright
