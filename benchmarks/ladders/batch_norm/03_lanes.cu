// Lanes: eight threads read a row of 64 channels, 16 bytes each, and every block has all channels.
// The mean is one kernel over x, the variance another, the result a third; a small kernel after
// each of the first two merges the blocks' sums.
// Why: every byte of every line is used, and all SMs work.
// Bound: memory: three reads and one write.
#include "rows.cuh"

namespace ladder {
namespace {

struct Plus {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// sums: (blocks, kChannels) of (x - mean)^2; of x if mean is null.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sums_kernel(Problem p, const float* mean, float* sums) {
  __shared__ float shared[kGroups * kChannels];
  const int channel = threadIdx.x % kLanes * kVec;
  float center[kVec], own[kVec] = {};
#pragma unroll
  for (int i = 0; i < kVec; ++i) center[i] = mean == nullptr ? 0.f : mean[channel + i];
  for_rows<false>(p.x, p.rows, [&](int64_t, Eight x) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float off = x[i] - center[i];
      own[i] += mean == nullptr ? off : off * off;
    }
  });
  merge_block(own, shared, sums + blockIdx.x * kChannels, Plus{});
}

// One block. result: the mean, or weight / sqrt(var + eps).
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(Problem p, const float* sums, int blocks, bool is_variance, float* result) {
  __shared__ float shared[kFinishThreads];
  const float average = merge_blocks(sums, blocks, shared, Plus{}) / static_cast<float>(p.rows);
  const int c = threadIdx.x;
  if (c >= kChannels) return;
  result[c] = is_variance ? p.weight[c] * rsqrtf(average + kEps) : average;
}

}  // namespace

const Rung kRung = {kStep, kThreads, kGroups* kChannels* int{sizeof(float)}};

void launch_rung(const Problem& p) {
  float* mean = p.floats();
  float* factor = mean + kChannels;
  float* sums = factor + kChannels;
  const unsigned blocks = row_blocks();
  for (const bool is_variance : {false, true}) {
    warpwright::launch(sums_kernel, dim3(blocks), dim3(kThreads), 0, p.stream, p,
                       is_variance ? mean : nullptr, sums);
    warpwright::launch(finish_kernel, dim3(1), dim3(kFinishThreads), 0, p.stream, p, sums,
                       static_cast<int>(blocks), is_variance, is_variance ? factor : mean);
  }
  warpwright::launch(apply_kernel<false>, dim3(blocks), dim3(kThreads), 0, p.stream, p, mean,
                     factor);
}

}  // namespace ladder
