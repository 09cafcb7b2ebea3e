// Products of fp32.
#include "ops/scan/cuda/launch.cuh"

namespace warpwright {

template void launch_scan_as<float, ProductScan<float>>(const ScanParams&, const ScanPlan&, void*,
                                                        cudaStream_t);

}  // namespace warpwright
