// Variances of bf16.
#include "ops/reduction/cuda/launch.cuh"

namespace warpwright {

template void launch_reduction_as<bf16, VarReduction<bf16>>(const ReductionParams&,
                                                            const ReductionPlan&, void*,
                                                            cudaStream_t);

}  // namespace warpwright
