// What the rungs share: the convolution, and what a rung says about itself. entry.cu calls
// launch_rung(); each rung's file defines it and kRung.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"
#include "common/ceil_div.h"
#include "host/launch.h"

namespace ladder {

using bf16 = __nv_bfloat16;

constexpr int kChannels = 64;  // of x and of y
constexpr int kTaps = 9;       // 3 x 3, padding 1: y is as large as x
constexpr int kFilter = kTaps * kChannels;
constexpr int kMaxSide = 90;  // rung 7's stages then fit in shared memory

// y = conv2d(x, w) + bias.
struct Conv {
  const bf16* x;     // (images, side, side, channels)
  const bf16* w;     // (filters, 3, 3, channels)
  const bf16* bias;  // (filters)
  bf16* windows;     // rung 3's matrix of windows: (pixels, 3, 3, channels)
  bf16* y;           // (images, side, side, filters)
  int images;
  int side;
  cudaStream_t stream;

  __host__ __device__ int pixels() const { return images * side * side; }
};

struct Rung {
  int blk_pixels;  // of y, that a block has at a time
  int stages;      // of the ring in shared memory; 0: there is none
  int threads;     // of a block
  int smem_bytes;  // of a block, static and dynamic
};

extern const Rung kRung;
void launch_rung(const Conv& c);

inline std::string describe(const Rung& r) {
  return said("blk_pixels", r.blk_pixels) + said("stages", r.stages) + said("threads", r.threads) +
         said("smem_bytes", r.smem_bytes);
}

// tensors: x, w, bias, windows, y. extents: images, side.
inline Conv problem_of(void* const* tensors, const int64_t* extents, cudaStream_t stream) {
  const int64_t images = extents[0], side = extents[1];
  check_extent("images", images, 1);
  check_extent("side", side, 1);
  check_extent("images x side x side", images * side * side, 128);
  if (side > kMaxSide) {
    throw std::invalid_argument("side = " + std::to_string(side) + ": expected at most " +
                                std::to_string(kMaxSide));
  }
  const char* names[] = {"x", "w", "bias", "windows", "y"};
  for (int i = 0; i < 5; ++i) check_pointer(names[i], tensors[i]);
  return {static_cast<const bf16*>(tensors[0]),
          static_cast<const bf16*>(tensors[1]),
          static_cast<const bf16*>(tensors[2]),
          static_cast<bf16*>(tensors[3]),
          static_cast<bf16*>(tensors[4]),
          static_cast<int>(images),
          static_cast<int>(side),
          stream};
}

// Where an output pixel is. Its window begins a row above and a column to the left.
struct Place {
  int image, row, col;
};
__device__ __forceinline__ Place place_of(const Conv& c, int pixel) {
  const int in_image = pixel % (c.side * c.side);
  return {pixel / (c.side * c.side), in_image / c.side, in_image % c.side};
}

// The 64 channels of x under a tap (0 .. 8) of an output pixel, or null in the padding.
__device__ __forceinline__ const bf16* under_tap(const Conv& c, Place at, int tap) {
  const int row = at.row + tap / 3 - 1, col = at.col + tap % 3 - 1;
  if (row < 0 || row >= c.side || col < 0 || col >= c.side) return nullptr;
  return c.x + (int64_t{at.image * c.side + row} * c.side + col) * kChannels;
}

// Tensor cores leave four sums in a thread: v[0], v[1] are neighbouring filters of one pixel, v[2],
// v[3] the same of the pixel 8 further.
__device__ __forceinline__ void store_fragment(const Conv& c, const float* v, int pixel,
                                               int filter) {
  bf16* y = c.y + int64_t{pixel} * kChannels + filter;
  *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(v[0], v[1]);
  *reinterpret_cast<__nv_bfloat162*>(y + 8 * kChannels) = __floats2bfloat162_rn(v[2], v[3]);
}

// The bias as a pass of its own over y. A thread has eight filters of one pixel.
static __global__ void add_bias_kernel(Conv c) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
  if (i >= int64_t{c.pixels()} * kChannels) return;
  uint4 y = *reinterpret_cast<const uint4*>(c.y + i);
  const uint4 bias = *reinterpret_cast<const uint4*>(c.bias + i % kChannels);
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&y);
  auto* addends = reinterpret_cast<const __nv_bfloat162*>(&bias);
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = __hadd2(pairs[j], addends[j]);
  *reinterpret_cast<uint4*>(c.y + i) = y;
}
inline void add_bias(const Conv& c) {
  const int64_t vectors = int64_t{c.pixels()} * kChannels / 8;
  warpwright::launch(add_bias_kernel,
                     dim3(static_cast<unsigned>(warpwright::ceil_div<int64_t>(vectors, 256))),
                     dim3(256), 0, c.stream, c);
}

}  // namespace ladder
