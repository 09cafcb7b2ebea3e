// The launch of a scan: its type's kernels, after the flags of a look-back are zeroed.
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/scan/cuda/linear.cuh"
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
    return launch_scan_as<int64_t, SumScan<int64_t>>(p, plan, workspace, stream);
  }
  for_dtype(p.dtype, [&]<class T>() {
    if (p.gate == nullptr) {
      launch_scan_as<T, SumScan<T>>(p, plan, workspace, stream);
    } else {
      launch_scan_as<T, LinearScan<T>>(p, plan, workspace, stream);
    }
  });
}

}  // namespace warpwright
