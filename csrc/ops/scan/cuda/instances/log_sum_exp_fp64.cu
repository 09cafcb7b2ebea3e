// Log-sum-exps of fp64.
#include "ops/scan/cuda/launch.cuh"
#include "ops/scan/cuda/log_sum_exp.cuh"

namespace warpwright {

template void launch_scan_as<double, LogSumExpScan<double>>(const ScanParams&, const ScanPlan&,
                                                            void*, cudaStream_t);

}  // namespace warpwright
