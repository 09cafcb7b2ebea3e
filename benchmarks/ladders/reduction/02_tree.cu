// Tree: a block adds 256 elements in shared memory, in eight rounds. The same kernel then adds the
// blocks' sums, until one is left.
// Why: no two threads write to one address, and the order is fixed: the same bits at every run.
// Bound: instructions. In round r one lane of 2^r works, and all lanes of its warp wait for it.
#include <algorithm>

#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 256;

// x: (numel). sums: one per block.
__global__ void __launch_bounds__(kThreads)
    tree_kernel(const float* x, float* sums, int64_t numel) {
  __shared__ float shared[kThreads];
  const int t = threadIdx.x;
  const int64_t i = int64_t{blockIdx.x} * kThreads + t;
  shared[t] = i < numel ? x[i] : 0.f;
  __syncthreads();
  for (int stride = 1; stride < kThreads; stride *= 2) {
    if (t % (2 * stride) == 0) shared[t] += shared[t + stride];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = shared[0];
}

int64_t blocks_for(int64_t numel) { return (numel + kThreads - 1) / kThreads; }

}  // namespace

const Rung kRung = {Function::kSum, 1, kAnyCols, kThreads, kThreads* int{sizeof(float)}};

void launch_rung(const Problem& p) {
  // Two arrays of sums: each launch reads one and writes the other.
  const int64_t first = blocks_for(p.numel());
  float* next = reinterpret_cast<float*>(p.workspace);
  float* other = next + first;
  const float* x = p.x;
  for (int64_t left = p.numel();;) {
    const int64_t blocks = blocks_for(left);
    float* to = blocks == 1 ? p.result : next;
    warpwright::launch(tree_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                       p.stream, x, to, left);
    if (blocks == 1) break;
    x = next;
    left = blocks;
    std::swap(next, other);
  }
}

}  // namespace ladder
