// Products of fp16.
#include "ops/scan/cuda/launch.cuh"

namespace warpwright {

template void launch_scan_as<half, ProductScan<half>>(const ScanParams&, const ScanPlan&, void*,
                                                      cudaStream_t);

}  // namespace warpwright
