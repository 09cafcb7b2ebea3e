// What the CPU convolutions share: the direct kernels, which shapes they take, and where a window
// lies inside the input.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/types.h"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

// Input columns that the windows of one output row span, and rows that `positions` rows of windows
// do: the zero-padded image.
inline int64_t window_columns(const Conv2dShape& s) {
  return (s.q - 1) * s.stride_w + (s.s - 1) * s.dilation_w + 1;
}
inline int64_t window_rows(const Conv2dShape& s, int64_t positions) {
  return (positions - 1) * s.stride_h + (s.r - 1) * s.dilation_h + 1;
}

// Few taps (C * R * S <= kFewTaps, one group, 32-bit float): too thin for a GEMM. The kernels copy
// a block of the padded image, so the padding must not be most of it.
constexpr int64_t kFewTaps = 32;
constexpr int64_t kFewTapsRows = 32;  // output rows of a block
inline bool has_few_taps(const Conv2dShape& s) {
  if (s.dtype != DType::kFloat32 || s.groups != 1 || s.c * s.taps() > kFewTaps) return false;
  const double copied = static_cast<double>(window_columns(s) + s.stride_w) *
                        static_cast<double>(window_rows(s, std::min(kFewTapsRows, s.p))) *
                        static_cast<double>(s.c);
  constexpr double kSmall = 65536;
  return copied <= kSmall + 4.0 * static_cast<double>(s.c * s.h * s.w);
}
void conv2d_few_taps_cpu(const Conv2dParams& params);
void conv2d_few_taps_weight_gradient_cpu(const Conv2dBackwardParams& params);

// One input channel a group.
inline bool is_depthwise(const Conv2dShape& s) { return s.groups > 1 && s.groups == s.c; }
void conv2d_depthwise_cpu(const Conv2dParams& params);
void conv2d_depthwise_input_gradient_cpu(const Conv2dBackwardParams& params);
void conv2d_depthwise_weight_gradient_cpu(const Conv2dBackwardParams& params);

// Output positions q in [begin, end) whose input column q * stride - pad + offset exists.
struct Span {
  int64_t begin, end;
};
inline Span valid_span(int64_t positions, int64_t extent, int64_t stride, int64_t pad,
                       int64_t offset) {
  const int64_t shift = pad - offset;  // first input column is q * stride - shift
  const int64_t begin = shift <= 0 ? 0 : (shift + stride - 1) / stride;
  const int64_t last = extent - 1 + shift;
  const int64_t end = last < 0 ? 0 : last / stride + 1;
  return {std::min(begin, positions),
          std::max(std::min(end, positions), std::min(begin, positions))};
}

}  // namespace warpwright
