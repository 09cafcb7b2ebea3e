// The launch of a reduction: its type's kernels, after the tickets are zeroed.
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/reduction/cuda/operands.cuh"
#include "ops/reduction/reduction.h"

namespace warpwright {

// In instances/.
template <class T, class Op>
void launch_reduction_as(const ReductionParams& p, const ReductionPlan& plan, void* workspace,
                         cudaStream_t stream);

namespace {

// The next kernel reads its elements meanwhile. A memset would have to end before it starts.
__global__ void zero_tickets_kernel(uint4* tickets, int64_t count) {
  let_next_kernel_start();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    tickets[i] = uint4{0, 0, 0, 0};
  }
}

}  // namespace

void launch_reduction(const ReductionParams& p, const ReductionPlan& plan, void* workspace,
                      cudaStream_t stream) {
  if (plan.splits > 1) {
    launch(zero_tickets_kernel, dim3(1), dim3(kReductionThreads), 0, stream,
           static_cast<uint4*>(workspace), plan.zeroed_bytes / 16);
  }
  for_dtype(p.dtype, [&]<class T>() {
    switch (p.kind) {
      case ReductionKind::kSum:
      case ReductionKind::kMean:
        return launch_reduction_as<T, SumReduction<T>>(p, plan, workspace, stream);
      case ReductionKind::kMax:
        return launch_reduction_as<T, MaxReduction<T>>(p, plan, workspace, stream);
      case ReductionKind::kLogSumExp:
        return launch_reduction_as<T, LogSumExpReduction<T>>(p, plan, workspace, stream);
      case ReductionKind::kVar:
      case ReductionKind::kStd:
        return launch_reduction_as<T, VarReduction<T>>(p, plan, workspace, stream);
    }
  });
}

}  // namespace warpwright
