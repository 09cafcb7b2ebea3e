// Instances with relu: rows, two passes.
#include "ops/batch_norm/cuda/rows.cuh"

namespace warpwright {

template void launch_rows<true>(const BatchNormParams&, const BatchNormPlan&, void*, cudaStream_t);
template void launch_rows<true>(const BatchNormBackwardParams&, const BatchNormPlan&, void*,
                                cudaStream_t);

}  // namespace warpwright
