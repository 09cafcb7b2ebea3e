// Naive: a thread computes one element of y, straight from the definition.
// Why: the place to start from. Each operand of each multiplication comes by a load of its own.
// Bound: L1. The lanes of a warp are 32 filters, so a load of weights asks 32 lines for 2 bytes.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kPixels = 4;
constexpr int kThreads = kPixels * kChannels;

// x, y NHWC, w KRSC. Block: 4 pixels by all filters; a warp has 32 filters of one pixel.
__global__ void __launch_bounds__(kThreads) naive_kernel(Conv c) {
  const int pixel = blockIdx.x * kPixels + threadIdx.x / kChannels;
  const int filter = threadIdx.x % kChannels;
  const Place at = place_of(c, pixel);
  float sum = 0;
  for (int tap = 0; tap < kTaps; ++tap) {
    const bf16* x = under_tap(c, at, tap);
    if (x == nullptr) continue;
    const bf16* w = c.w + filter * kFilter + tap * kChannels;
    for (int i = 0; i < kChannels; ++i) sum += __bfloat162float(x[i]) * __bfloat162float(w[i]);
  }
  c.y[int64_t{pixel} * kChannels + filter] = __float2bfloat16_rn(sum);
}

}  // namespace

const Rung kRung = {kPixels, 0, kThreads, 0};

void launch_rung(const Conv& c) {
  warpwright::launch(naive_kernel, dim3(static_cast<unsigned>(c.pixels() / kPixels)),
                     dim3(kThreads), 0, c.stream, c);
  add_bias(c);
}

}  // namespace ladder
