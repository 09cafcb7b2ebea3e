// Which shapes the direct kernels take: memory-bound ones, with few input channels (group_c * R * S
// products per output) or depthwise (group_c == 1). Every tensor is read or written directly;
// nothing is unfolded.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/address.h"
#include "common/ceil_div.h"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

// A unit of work is kRunQ neighbouring outputs of one row. A thread has kRunK output channels of
// it.
constexpr int kRunK = 8;
constexpr int kRunQ = 4;

// The weights of 64 outputs fit 48 KB of shared memory.
constexpr int64_t kFewChannelsMaxTaps = 160;

// The kernels count runs of outputs in 32 bits; the implicit GEMM takes larger shapes.
inline bool conv2d_direct_fits(const Conv2dShape& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  // A tile extends up to kOver outputs past the last one.
  constexpr int64_t kOver = 64;
  const int64_t down = (g.p + kOver) * g.stride_h + g.r * g.dilation_h + g.pad_h;
  const int64_t across = (g.q + kOver) * g.stride_w + g.s * g.dilation_w + g.pad_w;
  for (int64_t extent : {g.c, g.h, g.w, g.k, g.p, g.q, g.n, down, across}) {
    if (extent >= kLimit) return false;
  }
  const int64_t rows = std::max(g.p, g.h), runs = (std::max(g.q, g.w) + 3) / 4;
  return static_cast<double>(g.n) * static_cast<double>(rows) * static_cast<double>(runs) <
         static_cast<double>(kLimit);
}

// The number of units of all outputs.
inline int direct_units(const Conv2dShape& g) {
  return static_cast<int>(g.n * g.p * ceil_div<int64_t>(g.q, kRunQ));
}

// Few input channels, one group.
inline bool conv2d_few_channels_supported(const Conv2dShape& g) {
  return g.groups == 1 && g.c <= 4 && g.c * g.taps() <= kFewChannelsMaxTaps &&
         conv2d_direct_fits(g);
}

// The tile of a CTA in the tensor-core kernels: rows of whole runs of 16 output pixels. It has
// about 256 pixels; all tiles have equal height.
struct PixelTiles {
  int64_t rows, runs;        // per tile
  int64_t count_p, count_q;  // tiles per image
  int64_t input_rows;        // that a tile sees

  explicit PixelTiles(const Conv2dShape& s) {
    constexpr int64_t kPixels = 256;
    const int64_t all_runs = ceil_div(s.q, 16);
    runs = all_runs <= 2 ? all_runs : 1;
    rows = ceil_div(s.p, ceil_div(s.p * runs * 16, kPixels));
    count_p = ceil_div(s.p, rows);
    count_q = ceil_div(all_runs, runs);
    input_rows = (rows - 1) * s.stride_h + (s.r - 1) * s.dilation_h + 1;
  }

  int64_t input_cols(const Conv2dShape& s) const {
    return (runs * 16 - 1) * s.stride_w + (s.s - 1) * s.dilation_w + 1;
  }
};

// The FMA weight gradient rereads grad_output for every few taps. Beyond one 5 x 5 window the
// implicit GEMM is faster, and much faster for 7 x 7 and 3 channels.
inline bool conv2d_few_channels_wgrad_supported(const Conv2dShape& g) {
  constexpr int64_t kMaxTaps = 32;
  return conv2d_few_channels_supported(g) && g.c * g.taps() <= kMaxTaps;
}

// Depthwise with any multiplier k / c, in all three directions.
inline bool conv2d_depthwise_supported(const Conv2dShape& g) {
  return g.groups > 1 && g.groups == g.c && g.taps() <= kFewChannelsMaxTaps &&
         conv2d_direct_fits(g);
}

// Whether runs of `run` elements in rows of `extent` elements can be accessed as vectors.
inline bool runs_are_vectors(DType dtype, int64_t extent, int run, uintptr_t addresses) {
  const int64_t bytes = std::min<int64_t>(16, run * dtype_size(dtype));
  return extent * dtype_size(dtype) % bytes == 0 && addresses % bytes == 0;
}

constexpr int64_t accum_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

}  // namespace warpwright
