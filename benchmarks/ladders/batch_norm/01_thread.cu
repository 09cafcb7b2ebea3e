// Thread: one thread per channel walks over all rows three times: for the mean, the variance, and
// to write.
// Why: it is the definition, and the lanes of a warp read neighbouring channels: every line is
// used.
// Bound: latency. 64 threads ask for 64 numbers at a time; 130 SMs have nothing to do.
#include "ladder.cuh"

namespace ladder {
namespace {

// One block of a thread per channel.
__global__ void __launch_bounds__(kChannels) thread_kernel(Problem p) {
  const int c = threadIdx.x;
  float mean = 0, var = 0;
  for (int64_t r = 0; r < p.rows; ++r) mean += __bfloat162float(p.x[r * kChannels + c]);
  mean /= static_cast<float>(p.rows);
  for (int64_t r = 0; r < p.rows; ++r) {
    const float off = __bfloat162float(p.x[r * kChannels + c]) - mean;
    var += off * off;
  }
  const float scale = p.weight[c] * rsqrtf(var / static_cast<float>(p.rows) + kEps);
  for (int64_t r = 0; r < p.rows; ++r) {
    const float off = __bfloat162float(p.x[r * kChannels + c]) - mean;
    p.y[r * kChannels + c] = __float2bfloat16_rn(off * scale + p.bias[c]);
  }
}

}  // namespace

const Rung kRung = {1, kChannels, 0};

void launch_rung(const Problem& p) {
  warpwright::launch(thread_kernel, dim3(1), dim3(kChannels), 0, p.stream, p);
}

}  // namespace ladder
