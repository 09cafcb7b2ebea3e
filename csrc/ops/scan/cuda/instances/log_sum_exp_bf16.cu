// Log-sum-exps of bf16.
#include "ops/scan/cuda/launch.cuh"
#include "ops/scan/cuda/log_sum_exp.cuh"

namespace warpwright {

template void launch_scan_as<bf16, LogSumExpScan<bf16>>(const ScanParams&, const ScanPlan&, void*,
                                                        cudaStream_t);

}  // namespace warpwright
