// Products of int64.
#include "ops/scan/cuda/launch.cuh"

namespace warpwright {

template void launch_scan_as<int64_t, ProductScan<int64_t>>(const ScanParams&, const ScanPlan&,
                                                            void*, cudaStream_t);

}  // namespace warpwright
