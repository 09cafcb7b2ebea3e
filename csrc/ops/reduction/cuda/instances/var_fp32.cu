// Variances of fp32.
#include "ops/reduction/cuda/launch.cuh"

namespace warpwright {

template void launch_reduction_as<float, VarReduction<float>>(const ReductionParams&,
                                                              const ReductionPlan&, void*,
                                                              cudaStream_t);

}  // namespace warpwright
