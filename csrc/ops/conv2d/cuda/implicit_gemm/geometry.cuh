// The implicit GEMM's operands in terms of the convolution: planes of pixels, windows, and the
// phases of a strided input gradient.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/conv2d/conv2d.h"
#include "ops/conv2d/cuda/implicit_gemm/gather.cuh"

namespace warpwright {

// The pixels of a dense (n, c, rows, cols) tensor; `first` + i * `step` along each direction.
struct Plane {
  int64_t n, c, rows, cols;
  bool channels_last;

  int64_t pitch_n() const { return c * rows * cols; }
  int64_t pitch_h() const { return channels_last ? cols * c : cols; }
  int64_t pitch_w() const { return channels_last ? c : 1; }
  int64_t pitch_c() const { return channels_last ? 1 : rows * cols; }

  PixelAxis pixels(int64_t grid_rows, int64_t grid_cols, int64_t step_h, int64_t step_w,
                   int64_t first_h, int64_t first_w) const {
    PixelAxis axis;
    axis.cols = FastDivmod(std::max<int64_t>(1, grid_cols));
    axis.rows = FastDivmod(std::max<int64_t>(1, grid_rows));
    axis.extent = n * grid_rows * grid_cols;
    axis.step_h = static_cast<int>(step_h);
    axis.step_w = static_cast<int>(step_w);
    axis.first_h = static_cast<int>(first_h);
    axis.first_w = static_cast<int>(first_w);
    axis.pitch_n = pitch_n();
    axis.pitch_h = pitch_h();
    axis.pitch_w = pitch_w();
    return axis;
  }
  PixelAxis all_pixels() const { return pixels(rows, cols, 1, 1, 0, 0); }
};

inline Plane input_plane(const Conv2dShape& s) { return {s.n, s.c, s.h, s.w, s.channels_last}; }
inline Plane output_plane(const Conv2dShape& s) { return {s.n, s.k, s.p, s.q, s.channels_last}; }

// Taps r = 0 .. count_r - 1, s = 0 .. count_s - 1 and channels, in the order of the layout: (r, s,
// c) or (c, r, s). A tap moves the source by (step_h, step_w) and the address by the pitches.
inline WindowAxis window_axis(bool channels_last, int64_t channels, int64_t count_r,
                              int64_t count_s, int64_t step_h, int64_t step_w, int64_t pitch_r,
                              int64_t pitch_s, int64_t pitch_c) {
  WindowAxis axis{};
  axis.extent = static_cast<int>(channels * count_r * count_s);
  const int h = static_cast<int>(step_h), w = static_cast<int>(step_w);
  auto divmod = [](int64_t extent) { return FastDivmod(std::max<int64_t>(1, extent)); };
  if (channels_last) {
    axis.inner = divmod(channels);
    axis.middle = divmod(count_s);
    axis.pitch_outer = pitch_r;
    axis.pitch_middle = pitch_s;
    axis.pitch_inner = pitch_c;
    axis.h_outer = h;
    axis.w_middle = w;
  } else {
    axis.inner = divmod(count_s);
    axis.middle = divmod(count_r);
    axis.pitch_outer = pitch_c;
    axis.pitch_middle = pitch_r;
    axis.pitch_inner = pitch_s;
    axis.h_middle = h;
    axis.w_inner = w;
  }
  return axis;
}

// The window of x that an output pixel sees.
inline WindowAxis input_window(const Conv2dShape& s) {
  const Plane x = input_plane(s);
  return window_axis(s.channels_last, s.group_c(), s.r, s.s, s.dilation_h, s.dilation_w,
                     s.dilation_h * x.pitch_h(), s.dilation_w * x.pitch_w(), x.pitch_c());
}

// One direction of the input gradient with stride: the input rows of one phase (row + pad) %
// stride, and the taps that reach them. Within a phase, the next input row needs the next output
// row.
struct Phase {
  int64_t first, count;               // input rows first, first + stride, ...
  int64_t first_tap, tap_step, taps;  // first_tap, first_tap + tap_step, ...
  int64_t origin, tap_move;           // output row of the first input row and tap; moved per tap
};

inline Phase make_phase(int64_t phase, int64_t extent, int64_t taps, int64_t stride, int64_t pad,
                        int64_t dilation) {
  Phase f{};
  f.first = ((phase - pad) % stride + stride) % stride;
  f.count = f.first < extent ? (extent - f.first + stride - 1) / stride : 0;
  f.tap_step = stride / std::gcd(stride, dilation);
  const int64_t some_tap = std::min(f.tap_step, taps);
  while (f.first_tap < some_tap && f.first_tap * dilation % stride != phase) ++f.first_tap;
  f.taps = f.first_tap < some_tap ? (taps - f.first_tap + f.tap_step - 1) / f.tap_step : 0;
  f.origin = (f.first + pad - f.first_tap * dilation) / stride;
  f.tap_move = -(f.tap_step * dilation / stride);
  return f;
}

// The phases of one direction that have input rows; if `with_taps`, also taps.
inline std::vector<Phase> phases_of(int64_t extent, int64_t taps, int64_t stride, int64_t pad,
                                    int64_t dilation, bool with_taps) {
  std::vector<Phase> phases;
  auto add = [&](int64_t phase) {
    const Phase f = make_phase(phase, extent, taps, stride, pad, dilation);
    if (f.count > 0 && (f.taps > 0 || !with_taps)) phases.push_back(f);
  };
  if (!with_taps) {
    for (int64_t phase = 0; phase < stride; ++phase) add(phase);
    return phases;
  }
  // Tap t is in phase t * dilation % stride, and is the first of its phase if t < tap_step.
  const int64_t tap_step = stride / std::gcd(stride, dilation);
  for (int64_t t = 0; t < std::min(taps, tap_step); ++t) add(t * dilation % stride);
  return phases;
}

// Batches are launched in slices of fewer than 2^31 pixels of either tensor.
inline int64_t images_per_launch(const Conv2dShape& s) {
  const int64_t image = std::max({s.h * s.w, s.p * s.q, int64_t{1}});
  return std::max<int64_t>(1, INT32_MAX / image);
}

template <class F>
void for_slices(const Conv2dShape& shape, F&& f) {
  const int64_t images = images_per_launch(shape);
  for (int64_t first = 0; first < shape.n; first += images) {
    Conv2dShape slice = shape;
    slice.n = std::min(images, shape.n - first);
    f(slice, first);
  }
}

}  // namespace warpwright
