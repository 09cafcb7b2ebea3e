// Depthwise sums from their own products only, in the window's order. The fast kernels also
// multiply zeros that are no part of a sum (padding, a row's end, gaps between weights). A zero
// times an infinity is NaN, so a sum that is NaN is computed again here.
#pragma once

#include "device/types.cuh"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

// A call's extents in 32 bits: x (n, h, w, c), y and dy (n, p, q, c).
struct DepthwiseImage {
  int n, c, h, w, p, q, pad_h, pad_w;

  explicit DepthwiseImage(const Conv2dShape& s)
      : n(static_cast<int>(s.n)),
        c(static_cast<int>(s.c)),
        h(static_cast<int>(s.h)),
        w(static_cast<int>(s.w)),
        p(static_cast<int>(s.p)),
        q(static_cast<int>(s.q)),
        pad_h(static_cast<int>(s.pad_h)),
        pad_w(static_cast<int>(s.pad_w)) {}
};

// One output of a convolution with stride 1. w (c, kTaps, kTaps).
template <int kTaps, class T>
__device__ __noinline__ float exact_depthwise_output(const T* x, const T* w, float bias, int image,
                                                     int channel, int row, int col, bool flip,
                                                     const DepthwiseImage& s) {
  float sum = bias;
  for (int r = 0; r < kTaps; ++r) {
    const int h = row - s.pad_h + r;
    if (h < 0 || h >= s.h) continue;
    for (int tap = 0; tap < kTaps; ++tap) {
      const int v = col - s.pad_w + tap;
      if (v < 0 || v >= s.w) continue;
      const int place = r * kTaps + tap;
      sum += convert<float>(x[((int64_t{image} * s.h + h) * s.w + v) * s.c + channel]) *
             convert<float>(
                 w[int64_t{channel} * kTaps * kTaps + (flip ? kTaps * kTaps - 1 - place : place)]);
    }
  }
  return sum;
}

// The units of one part of a weight gradient: unit u has the columns u % col_tiles * width +
// [0, width) of the images u / col_tiles * images + [0, images).
struct DepthwisePart {
  int first, step, units, col_tiles, width, images;
};

// The sum of tap (r, tap) of a channel over a part.
template <class T>
__device__ __noinline__ float exact_depthwise_tap(const T* x, const T* dy, int channel, int r,
                                                  int tap, int stride, const DepthwisePart& part,
                                                  const DepthwiseImage& s) {
  float sum = 0;
  for (int unit = part.first; unit < part.units; unit += part.step) {
    const int first_col = unit % part.col_tiles * part.width;
    const int first_image = unit / part.col_tiles * part.images;
    for (int image = first_image; image < min(first_image + part.images, s.n); ++image) {
      for (int row = 0; row < s.p; ++row) {
        const int h = row * stride - s.pad_h + r;
        if (h < 0 || h >= s.h) continue;
        for (int col = first_col; col < min(first_col + part.width, s.q); ++col) {
          const int v = col * stride - s.pad_w + tap;
          if (v < 0 || v >= s.w) continue;
          sum += convert<float>(dy[((int64_t{image} * s.p + row) * s.q + col) * s.c + channel]) *
                 convert<float>(x[((int64_t{image} * s.h + h) * s.w + v) * s.c + channel]);
        }
      }
    }
  }
  return sum;
}

}  // namespace warpwright
