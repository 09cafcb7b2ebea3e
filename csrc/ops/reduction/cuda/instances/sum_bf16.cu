// Sums and means of bf16.
#include "ops/reduction/cuda/launch.cuh"

namespace warpwright {

template void launch_reduction_as<bf16, SumReduction<bf16>>(const ReductionParams&,
                                                            const ReductionPlan&, void*,
                                                            cudaStream_t);

}  // namespace warpwright
