// Shared by the CPU convolutions: the direct kernels, and which taps of a window are inside the
// input.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/types.h"
#include "ops/conv2d/cpu_path.h"

namespace warpwright {

void conv2d_few_taps_cpu(const Conv2dParams& params);
void conv2d_few_taps_weight_gradient_cpu(const Conv2dBackwardParams& params);

void conv2d_bias_gradient_cpu(const Conv2dBackwardParams& params);

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
