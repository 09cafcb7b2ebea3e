// Atomic: a thread per element, which adds it to the one result.
// Why: three lines, and the answer is right up to rounding. The order of the additions is whatever
// the GPU does, so two runs differ in their last bits.
// Bound: L2. All additions meet at one address, and its slice does about one per cycle.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 256;

// x: (numel). Grid: one thread per element.
__global__ void __launch_bounds__(kThreads)
    atomic_kernel(const float* x, float* sum, int64_t numel) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < numel) atomicAdd(sum, x[i]);
}

}  // namespace

const Rung kRung = {Function::kSum, 1, kAnyCols, kThreads, 0};

void launch_rung(const Problem& p) {
  const auto blocks = static_cast<unsigned>((p.numel() + kThreads - 1) / kThreads);
  warpwright::cuda_check(cudaMemsetAsync(p.result, 0, sizeof(float), p.stream), "memset");
  warpwright::launch(atomic_kernel, dim3(blocks), dim3(kThreads), 0, p.stream, p.x, p.result,
                     p.numel());
}

}  // namespace ladder
