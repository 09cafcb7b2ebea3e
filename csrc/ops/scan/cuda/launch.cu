// The launch of a scan: its type's kernels, after the flags of a look-back are zeroed.
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/scan/cuda/linear.cuh"
#include "ops/scan/cuda/log_sum_exp.cuh"
#include "ops/scan/cuda/operators.cuh"
#include "ops/scan/scan.h"

namespace warpwright {

// In instances/.
template <class T, class Scan>
void launch_scan_as(const ScanParams& p, const ScanPlan& plan, void* workspace,
                    cudaStream_t stream);

void launch_scan(const ScanParams& p, const ScanPlan& plan, void* workspace, cudaStream_t stream) {
  if (plan.look_back) {
    cuda_check(cudaMemsetAsync(workspace, 0, static_cast<size_t>(plan.zeroed_bytes), stream),
               "the flags of a scan");
  }
  if (p.dtype == DType::kInt64) {
    if (p.kind == ScanKind::kProduct) {
      return launch_scan_as<int64_t, ProductScan<int64_t>>(p, plan, workspace, stream);
    }
    return launch_scan_as<int64_t, SumScan<int64_t>>(p, plan, workspace, stream);
  }
  for_dtype(p.dtype, [&]<class T>() {
    if (p.is_levels) return launch_scan_as<T, LevelScan<T>>(p, plan, workspace, stream);
    if constexpr (std::is_same_v<T, float>) {
      // Each gate of the step before it: a gradient.
      if (p.is_shifted) return launch_scan_as<T, PreciseScan>(p, plan, workspace, stream);
    }
    if (p.gate != nullptr) return launch_scan_as<T, LinearScan<T>>(p, plan, workspace, stream);
    switch (p.kind) {
      case ScanKind::kSum:
        return launch_scan_as<T, SumScan<T>>(p, plan, workspace, stream);
      case ScanKind::kProduct:
        return launch_scan_as<T, ProductScan<T>>(p, plan, workspace, stream);
      case ScanKind::kLogSumExp:
        return launch_scan_as<T, LogSumExpScan<T>>(p, plan, workspace, stream);
    }
  });
}

}  // namespace warpwright
