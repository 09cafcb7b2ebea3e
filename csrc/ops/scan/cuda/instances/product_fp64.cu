// Products of fp64.
#include "ops/scan/cuda/launch.cuh"

namespace warpwright {

template void launch_scan_as<double, ProductScan<double>>(const ScanParams&, const ScanPlan&, void*,
                                                          cudaStream_t);

}  // namespace warpwright
