// Shuffle: lanes hand their sums to each other in registers, in five steps. Shared memory sees one
// number per warp, and one barrier does for nine.
// Why: a shuffle is one instruction for all 32 lanes, and no lane waits for another's round.
// Bound: memory, nearly. A thread loads four bytes and ends, so a block's life is mostly latency.
#include <algorithm>

#include "ladder.cuh"

namespace ladder {
namespace {

using warpwright::Sum;
using warpwright::warp_reduce;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / warpwright::kWarpSize;

// x: (numel). sums: one per block.
__global__ void __launch_bounds__(kThreads)
    shuffle_kernel(const float* x, float* sums, int64_t numel) {
  __shared__ float shared[kWarps];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int warp = threadIdx.x / warpwright::kWarpSize;
  const float sum = warp_reduce(i < numel ? x[i] : 0.f, Sum{});
  if (threadIdx.x % warpwright::kWarpSize == 0) shared[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = shared[0];
    for (int w = 1; w < kWarps; ++w) total += shared[w];
    sums[blockIdx.x] = total;
  }
}

int64_t blocks_for(int64_t numel) { return (numel + kThreads - 1) / kThreads; }

}  // namespace

const Rung kRung = {Function::kSum, 1, kAnyCols, kThreads, kWarps* int{sizeof(float)}};

void launch_rung(const Problem& p) {
  const int64_t first = blocks_for(p.numel());
  float* next = reinterpret_cast<float*>(p.workspace);
  float* other = next + first;
  const float* x = p.x;
  for (int64_t left = p.numel();;) {
    const int64_t blocks = blocks_for(left);
    float* to = blocks == 1 ? p.result : next;
    warpwright::launch(shuffle_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                       p.stream, x, to, left);
    if (blocks == 1) break;
    x = next;
    left = blocks;
    std::swap(next, other);
  }
}

}  // namespace ladder
