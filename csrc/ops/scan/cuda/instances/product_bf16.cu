// Products of bf16.
#include "ops/scan/cuda/launch.cuh"

namespace warpwright {

template void launch_scan_as<bf16, ProductScan<bf16>>(const ScanParams&, const ScanPlan&, void*,
                                                      cudaStream_t);

}  // namespace warpwright
