// Gradients of fp32, combined in double.
#include "ops/scan/cuda/launch.cuh"
#include "ops/scan/cuda/linear.cuh"

namespace warpwright {

template void launch_scan_as<float, PreciseScan>(const ScanParams&, const ScanPlan&, void*,
                                                 cudaStream_t);

}  // namespace warpwright
