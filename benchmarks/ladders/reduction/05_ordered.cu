// Ordered: the block that finishes last adds the sums of all, in the order of blocks.
// Why: one launch less. Which block is last differs from run to run; what it adds, and in which
// order, does not.
// Bound: memory.
#include "block_sum.cuh"
#include "device/ticket.cuh"

namespace ladder {
namespace {

// tickets: 0 before the launch. sums: one per block.
__global__ void __launch_bounds__(kSumThreads, kBlocksPerSm)
    ordered_kernel(const float* x, float* sums, int* tickets, float* result, int64_t numel) {
  __shared__ float shared[kSumWarps];
  __shared__ bool is_last;
  const float sum = block_sum(x, numel, shared);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    __threadfence();  // whoever sees the ticket sees the sum
    is_last = warpwright::take_ticket(tickets) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  float total = 0;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += kSumThreads) {
    total += __ldcg(sums + i);  // from L2: another SM wrote it
  }
  total = warpwright::block_reduce(total, warpwright::Sum{}, 0.f, shared);
  if (threadIdx.x == 0) *result = total;
}

}  // namespace

const Rung kRung = {Function::kSum, kVec, kAnyCols, kSumThreads,
                    kSumWarps* int{sizeof(float)} + int{sizeof(int)}};

void launch_rung(const Problem& p) {
  const unsigned blocks = sum_blocks();
  int* tickets = reinterpret_cast<int*>(p.workspace);
  warpwright::cuda_check(cudaMemsetAsync(tickets, 0, sizeof(int), p.stream), "memset");
  warpwright::launch(ordered_kernel, dim3(blocks), dim3(kSumThreads), 0, p.stream, p.x,
                     reinterpret_cast<float*>(p.workspace + 16), tickets, p.result, p.numel());
}

}  // namespace ladder
