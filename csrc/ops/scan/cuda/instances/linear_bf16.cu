// Linear recurrences of bf16.
#include "ops/scan/cuda/launch.cuh"
#include "ops/scan/cuda/linear.cuh"

namespace warpwright {

template void launch_scan_as<bf16, LinearScan<bf16>>(const ScanParams&, const ScanPlan&, void*,
                                                     cudaStream_t);

}  // namespace warpwright
