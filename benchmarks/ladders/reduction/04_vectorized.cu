// Vectorized: a fixed number of blocks walks over x. A thread has eight 16-byte loads in flight and
// adds in registers. A second kernel adds the blocks' sums.
// Why: memory answers after some 700 ns, so an SM must have 25 KB or more under way all the time.
// Bound: memory. What is left beside it is the second launch.
#include "block_sum.cuh"

namespace ladder {
namespace {

__global__ void __launch_bounds__(kSumThreads, kBlocksPerSm)
    vectorized_kernel(const float* x, float* sums, int64_t numel) {
  __shared__ float shared[kSumWarps];
  const float sum = block_sum(x, numel, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block: adds `count` sums.
__global__ void __launch_bounds__(kSumThreads)
    finish_kernel(const float* sums, float* result, int count) {
  __shared__ float shared[kSumWarps];
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kSumThreads) sum += sums[i];
  sum = warpwright::block_reduce(sum, warpwright::Sum{}, 0.f, shared);
  if (threadIdx.x == 0) *result = sum;
}

}  // namespace

const Rung kRung = {Function::kSum, kVec, kAnyCols, kSumThreads, kSumWarps* int{sizeof(float)}};

void launch_rung(const Problem& p) {
  const unsigned blocks = sum_blocks();
  warpwright::launch(vectorized_kernel, dim3(blocks), dim3(kSumThreads), 0, p.stream, p.x,
                     reinterpret_cast<float*>(p.workspace), p.numel());
  warpwright::launch(finish_kernel, dim3(1), dim3(kSumThreads), 0, p.stream,
                     reinterpret_cast<float*>(p.workspace), p.result, static_cast<int>(blocks));
}

}  // namespace ladder
