// Maxima of fp64.
#include "ops/reduction/cuda/launch.cuh"

namespace warpwright {

template void launch_reduction_as<double, MaxReduction<double>>(const ReductionParams&,
                                                                const ReductionPlan&, void*,
                                                                cudaStream_t);

}  // namespace warpwright
