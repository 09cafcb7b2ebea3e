// Tiled: a block has 8 x 8 pixels of an image and all filters; a thread 4 pixels by 4 filters.
// Why: windows overlap. A patch of 10 x 10 pixels in shared memory holds the windows of 64 outputs,
// so an element of x is read from L2 1.6 times in place of 9. 8 reads of shared memory then feed 16
// multiplications.
// Bound: shared memory, a little more than the FMA units; and nothing hides the copies.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kSide = 8;  // of a block's square of pixels
constexpr int kPatch = kSide + 2;
constexpr int kChunk = 16;  // channels in shared memory at a time
constexpr int kThreads = 256;

struct Shared {
  float x[kChunk][kPatch * kPatch];
  float w[kTaps][kChunk][kChannels];
};

// x, y NHWC, w KRSC. Grid: images by squares of their pixels. Thread t has the filters
// t % 16 * 4 .. + 3 and the pixels t / 16 * 4 .. + 3 of the square, which are in one row.
__global__ void __launch_bounds__(kThreads) tiled_kernel(Conv c) {
  __shared__ Shared shared;
  const int across = (c.side + kSide - 1) / kSide;
  const int first_row = blockIdx.x / across % across * kSide;
  const int first_col = blockIdx.x % across * kSide;
  const int image = blockIdx.x / (across * across);
  const int filter = threadIdx.x % 16 * 4;
  const int row = threadIdx.x / 32, col = threadIdx.x / 16 % 2 * 4;

  float sum[4][4] = {};  // pixels, filters
  for (int channel = 0; channel < kChannels; channel += kChunk) {
    for (int i = threadIdx.x; i < kChunk * kPatch * kPatch; i += kThreads) {
      const int pixel = i / kChunk;
      // As the middle tap of that pixel, which may be outside of the image.
      const Place at{image, first_row + pixel / kPatch - 1, first_col + pixel % kPatch - 1};
      const bf16* x = under_tap(c, at, kTaps / 2);
      shared.x[i % kChunk][pixel] = x ? __bfloat162float(x[channel + i % kChunk]) : 0.f;
    }
    for (int i = threadIdx.x; i < kChannels * kTaps * kChunk; i += kThreads) {
      const int tap = i / kChunk % kTaps, k = i / (kChunk * kTaps);
      shared.w[tap][i % kChunk][k] =
          __bfloat162float(c.w[k * kFilter + tap * kChannels + channel + i % kChunk]);
    }
    __syncthreads();
    for (int tap = 0; tap < kTaps; ++tap) {
      const int window = (row + tap / 3) * kPatch + col + tap % 3;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float4 w = *reinterpret_cast<const float4*>(&shared.w[tap][i][filter]);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const float x = shared.x[i][window + p];
          sum[p][0] += x * w.x;
          sum[p][1] += x * w.y;
          sum[p][2] += x * w.z;
          sum[p][3] += x * w.w;
        }
      }
    }
    __syncthreads();  // nobody reads the chunk any more
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (first_row + row >= c.side || first_col + col + p >= c.side) continue;
    const int64_t pixel = int64_t{image * c.side + first_row + row} * c.side + first_col + col + p;
    auto* y = reinterpret_cast<__nv_bfloat162*>(c.y + pixel * kChannels + filter);
    y[0] = __floats2bfloat162_rn(sum[p][0], sum[p][1]);
    y[1] = __floats2bfloat162_rn(sum[p][2], sum[p][3]);
  }
}

}  // namespace

const Rung kRung = {kSide * kSide, 1, kThreads, int{sizeof(Shared)}};

void launch_rung(const Conv& c) {
  const int across = warpwright::ceil_div(c.side, kSide);
  warpwright::launch(tiled_kernel, dim3(static_cast<unsigned>(c.images * across * across)),
                     dim3(kThreads), 0, c.stream, c);
  add_bias(c);
}

}  // namespace ladder
