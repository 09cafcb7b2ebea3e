// Which kernels a convolution takes on the CPU, by its shape and the CPU's features. Never by
// timing, because the bits of a result must not depend on the load.
#pragma once

#include <algorithm>
#include <string>

#include "ops/conv2d/conv2d.h"

namespace warpwright {

// The facts about the machine and torch's settings that the choice uses.
struct Conv2dCpu {
  bool onednn;  // built into torch and not turned off (torch.backends.mkldnn.enabled)
  bool avx512;
};

enum class Conv2dCpuPath { kOneDnn, kFewTaps, kDepthwise, kGemm };

// Input columns under the windows of one output row, and input rows under `positions` rows of
// windows: the extents of the zero-padded image.
inline int64_t window_columns(const Conv2dShape& s) {
  return (s.q - 1) * s.stride_w + (s.s - 1) * s.dilation_w + 1;
}
inline int64_t window_rows(const Conv2dShape& s, int64_t positions) {
  return (positions - 1) * s.stride_h + (s.r - 1) * s.dilation_h + 1;
}

// Few taps (C * R * S <= kFewTaps, one group, 32-bit float) are too thin for a GEMM. The kernels
// copy a block of the padded image, so padding must not be most of the block.
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

// Pixels of the output, in double: the number may exceed memory, or an integer.
inline double output_pixels(const Conv2dShape& s) {
  return static_cast<double>(s.n) * static_cast<double>(s.p) * static_cast<double>(s.q);
}

// One input channel per group.
inline bool is_depthwise(const Conv2dShape& s) { return s.groups > 1 && s.groups == s.c; }

// oneDNN pads all sides equally, so its output must have the resulting size.
inline bool has_even_padding(const Conv2dShape& s) {
  auto positions = [](int64_t extent, int64_t pad, int64_t taps, int64_t dilation, int64_t stride) {
    return (extent + 2 * pad - (taps - 1) * dilation - 1) / stride + 1;
  };
  return positions(s.h, s.pad_h, s.r, s.dilation_h, s.stride_h) == s.p &&
         positions(s.w, s.pad_w, s.s, s.dilation_w, s.stride_w) == s.q;
}

// Why a kernel of ours runs in place of oneDNN's, for explain(); null if oneDNN's is the faster
// one, as benchmarks/cpu_speed.py measured. Ours are faster if oneDNN has only its reference kernel
// for the shape, or copies more than it computes.
inline const char* why_ours_is_faster(ConvDirection direction, const Conv2dShape& s,
                                      const Conv2dCpu& cpu) {
  constexpr int64_t kBlock = 8;  // channels that its AVX2 kernels process together
  const bool forward = direction == ConvDirection::kFprop;
  const bool of_weight = direction == ConvDirection::kWgrad;
  // It copies NCHW groups into blocks of channels, several times as wide as a small group.
  const bool one_to_one = s.groups == s.c && s.groups == s.k;
  if (s.groups > 1 && !one_to_one && !s.channels_last) {
    return "oneDNN copies NCHW groups into wider blocks";
  }
  if (is_depthwise(s)) {
    if (s.c < kBlock && !s.channels_last) return "oneDNN takes 8 channels at a time";
    const bool long_rows = std::max(s.r, s.s) > 3;
    const bool is_slow = of_weight && long_rows && s.c >= kBlock;
    return is_slow ? "oneDNN's weight gradient of a long depthwise window is slower" : nullptr;
  }
  if (direction == ConvDirection::kDgrad) {
    if (s.taps() == 1 && s.stride_h * s.stride_w > 1) {
      return "oneDNN's input gradient of a strided 1x1 window is slower";
    }
    if (s.groups == 1 && s.c < kBlock) return "oneDNN takes 8 channels at a time";
  }
  if (has_few_taps(s) && s.c == 1 && !s.channels_last && (forward || !cpu.avx512)) {
    return "oneDNN is slower for one channel";
  }
  // oneDNN copies NHWC weights into blocks, so it is slower for few pixels. Our gradient of the
  // weights is summed in double, so it is slower for large weights.
  constexpr double kFewPixels = 32;
  constexpr int64_t kLargeWeights = 1 << 18;
  const bool few_pixels = s.channels_last && output_pixels(s) <= kFewPixels;
  const bool large_weights = of_weight && s.k * s.group_c() * s.taps() > kLargeWeights;
  return few_pixels && !large_weights ? "oneDNN copies the weight, for few pixels" : nullptr;
}

inline const char* why_not_onednn(ConvDirection direction, const Conv2dShape& s,
                                  const Conv2dCpu& cpu) {
  if (!cpu.onednn) return "oneDNN is off";
  if (s.dtype != DType::kFloat32) return "oneDNN is taken for float32 only";
  // Smaller products end before oneDNN has looked up its kernel.
  constexpr double kMinProducts = 1 << 18;
  const double products = output_pixels(s) * static_cast<double>(s.k * s.group_c() * s.taps());
  if (products < kMinProducts) return "too small for oneDNN, which first looks up its kernel";
  if (!has_even_padding(s)) return "oneDNN pads all sides equally";
  return why_ours_is_faster(direction, s, cpu);
}

inline Conv2dCpuPath choose_conv2d_cpu_path(ConvDirection direction, const Conv2dShape& s,
                                            const Conv2dCpu& cpu) {
  if (why_not_onednn(direction, s, cpu) == nullptr) return Conv2dCpuPath::kOneDnn;
  if (is_depthwise(s)) return Conv2dCpuPath::kDepthwise;
  const bool few = has_few_taps(s) && direction != ConvDirection::kDgrad;
  return few ? Conv2dCpuPath::kFewTaps : Conv2dCpuPath::kGemm;
}

// The path and its reason.
inline std::string describe_conv2d_cpu(ConvDirection direction, const Conv2dShape& s,
                                       const Conv2dCpu& cpu) {
  const char* why_not = why_not_onednn(direction, s, cpu);
  if (why_not == nullptr) return "native's kernel (oneDNN), the faster one for this shape";
  const std::string reason = std::string(" (") + why_not + ")";
  switch (choose_conv2d_cpu_path(direction, s, cpu)) {
    case Conv2dCpuPath::kFewTaps:
      return "direct loops: at most 32 taps, too few for a matrix product" + reason;
    case Conv2dCpuPath::kDepthwise:
      return "direct loops: one input channel per group" + reason;
    default:
      return "implicit GEMM by tiles on ATen's matrix products" + reason;
  }
}

}  // namespace warpwright
