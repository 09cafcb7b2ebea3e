// Linear recurrences of fp32.
#include "ops/scan/cuda/launch.cuh"
#include "ops/scan/cuda/linear.cuh"

namespace warpwright {

template void launch_scan_as<float, LinearScan<float>>(const ScanParams&, const ScanPlan&, void*,
                                                       cudaStream_t);

}  // namespace warpwright
