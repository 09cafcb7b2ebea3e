// Copies of a tensor of 16 or 32 bits between planes (NCHW, KCRS) and rows of channels (NHWC,
// KRSC). An NCHW convolution copies its operands for a channels-last kernel, and D back if the
// kernel stores rows. dgrad in TF32 reads the weights with contiguous filters.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/conv2d/conv2d.h"

namespace warpwright {

// Pixels (step_h * i, step_w * j) of planes of height x width; a sampled row has `columns`. A 1 x 1
// window of stride (step_h, step_w) reads these pixels alone, so the gradient of the others is
// zero.
struct PlaneSample {
  int64_t step_h, step_w, height, width, columns;
};

// A tensor of `images` x `channels` x `pixels` (of a plane). For a weight: filters, channels, taps.
struct LayoutTensor {
  int64_t images, channels, pixels;
  int64_t element;                         // bytes, 2 or 4
  std::optional<PlaneSample> sample = {};  // the pixels of rows in planes; none: all

  int64_t bytes() const { return images * channels * pixels * element; }  // of rows
  // Otherwise both layouts are the same.
  bool has_layouts() const { return sample || (channels > 1 && pixels > 1); }
  // Rows are written and read in vectors of 16 bytes, and pixels are counted in 32 bits.
  bool can_change() const {
    constexpr int64_t kMaxPixels = int64_t{1} << 30;
    return channels % (16 / element) == 0 && images * pixels <= kMaxPixels &&
           (!sample || sample->height * sample->width <= kMaxPixels);
  }
};

inline LayoutTensor layout_of_x(const Conv2dShape& s) {
  return {s.n, s.c, s.h * s.w, dtype_size(s.dtype)};
}
inline LayoutTensor layout_of_w(const Conv2dShape& s) {
  return {s.k, s.group_c(), s.taps(), dtype_size(s.dtype)};
}
inline LayoutTensor layout_of_y(const Conv2dShape& s) {
  return {s.n, s.k, s.p * s.q, dtype_size(s.dtype)};
}

// x as a strided 1 x 1 window sees it: pixel (p, q) of y's plane.
inline LayoutTensor sampled_layout_of_x(const Conv2dShape& s) {
  return {s.n, s.c, s.p * s.q, dtype_size(s.dtype),
          PlaneSample{s.stride_h, s.stride_w, s.h, s.w, s.q}};
}

// Elements of a plane that one access moves: the most that divide the plane and the address.
inline int plane_vector(int64_t pixels, uintptr_t address, int64_t element = 2) {
  int size = static_cast<int>(16 / element);
  while (pixels % size != 0 || address % static_cast<uintptr_t>(size * element) != 0) size /= 2;
  return size;
}

#ifdef WARPWRIGHT_WITH_CUDA
// `rows` is 16-byte aligned, `planes` has any address. rows_to_planes writes zeros to the pixels
// that a sample leaves out.
void launch_planes_to_rows(const LayoutTensor& tensor, const void* planes, void* rows,
                           cudaStream_t stream);
void launch_rows_to_planes(const LayoutTensor& tensor, const void* rows, void* planes,
                           cudaStream_t stream);
// The float32 weights of `shape`, in its layout, to (C, R S, K / groups).
void launch_transpose_weight(const Conv2dShape& shape, const void* weight, void* transposed,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
