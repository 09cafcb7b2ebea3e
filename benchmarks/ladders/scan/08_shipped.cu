// Shipped: cumsum's own kernel.
// Why: its look-back has two levels. A tile combines the totals of its group of 32 tiles in a fixed
// tree; the fold from left to right goes over whole groups, so it is 32 times shorter. Sums between
// tiles are float64.
// Bound: memory: one read and one write.
#include "ladder.cuh"
#include "ops/scan/cuda/launch.cuh"

namespace ladder {

const Rung kRung = {1, warpwright::row_threads(warpwright::RowKind::kLong), 1024};

void launch_rung(const Problem& p) {
  using namespace warpwright;  // the op's parameters and its choice of a plan
  ScanParams call{};
  call.dtype = DType::kFloat32;
  call.length = p.numel;
  call.input = p.x;
  call.output = p.y;
  const ScanPlan plan = choose_scan(call);
  cuda_check(cudaMemsetAsync(p.workspace, 0, static_cast<size_t>(plan.zeroed_bytes), p.stream),
             "memset");
  launch_scan_rows<float, SumScan<float>>(call, plan, p.workspace, p.stream);
}

}  // namespace ladder
