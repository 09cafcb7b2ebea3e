// Maxima of fp16.
#include "ops/reduction/cuda/launch.cuh"

namespace warpwright {

template void launch_reduction_as<half, MaxReduction<half>>(const ReductionParams&,
                                                            const ReductionPlan&, void*,
                                                            cudaStream_t);

}  // namespace warpwright
