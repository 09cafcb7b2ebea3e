// Linear recurrences of bf16 whose gates are given by levels.
#include "ops/scan/cuda/launch.cuh"
#include "ops/scan/cuda/linear.cuh"

namespace warpwright {

template void launch_scan_as<bf16, LevelScan<bf16>>(const ScanParams&, const ScanPlan&, void*,
                                                    cudaStream_t);

}  // namespace warpwright
