// fprop and wgrad of an image network's first convolution by wgmma on sm_90a: few input channels,
// 16-bit types, NHWC. In shared memory a pixel has as many channels as make a step of the window 16
// bytes (4 at stride 2, 8 at stride 1). A row of the image is then a wgmma operand as it stands:
// the windows of neighbouring outputs are its overlapping rows, so there is no im2col.
#pragma once

#include <algorithm>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

constexpr int kStemFilters = 64;   // per CTA: the rows of a wgmma
constexpr int kStemOutputs = 128;  // of a row, per step
constexpr int kStemRingRows = 32;  // rows of the image in shared memory
constexpr int kStemRowTaps = 32;   // at most, of one row of the window: two wgmma of k = 16
constexpr int kStemMaxRows = 7;    // of the window
constexpr int kStemFewRows = 3;    // of the window, in a form of the kernels
constexpr int kStemGradStages = 4;
// Outputs, and the pixels of the last window's row, 16 bytes per step of the window.
constexpr int kStemRowBytes = (kStemOutputs - 1) * 16 + kStemRowTaps * 2;

// Channels of a pixel in shared memory.
constexpr int stem_slots(int64_t stride_w) { return stride_w == 1 ? 8 : 4; }
// Elements of a row of the window in a form of the kernels, zeros included.
constexpr int stem_row_taps(int slots, int rows) {
  return slots == 4 && rows == kStemFewRows ? 16 : kStemRowTaps;
}

// The walk over an image; a kernel argument. A step is a strip of kStemOutputs outputs of one row.
struct StemShape {
  int c, h, w, k, r, s, p, q;
  int stride_h, stride_w, pad_h, pad_w, dilation_h;
  int span;  // rows of the image from a window's first to its last
  int strips, steps;
  int chunks, parts;  // CTAs: of kStemFilters filters; for each chunk
};

struct StemConfig {
  bool is_wgrad;
  bool few_rows;  // the form for kStemFewRows
  StemShape shape;

  int slots() const { return stem_slots(shape.stride_w); }
  int weight_bytes() const {
    const int rows = few_rows ? kStemFewRows : kStemMaxRows;
    return rows * stem_row_taps(slots(), rows) * kStemFilters * 2;
  }
  int64_t smem_bytes() const {
    const int64_t rest = is_wgrad ? kStemGradStages * kStemOutputs * 128  // grad_output
                                  : 4 * 64 * 128 + weight_bytes();        // two buffers per group
    return rest + kStemRingRows * kStemRowBytes + 2048;  // 2048: barriers, and the alignment
  }
  // wgrad: both groups of a CTA have sums of their own.
  int sums() const { return 2 * shape.parts; }
  int pitch_k() const { return shape.chunks * kStemFilters; }
};

// Why another kernel runs; null if this one takes the problem.
inline const char* why_not_stem(ConvDirection direction, const Conv2dShape& s,
                                const Conv2dAddresses& addresses) {
  if (!s.sm90) return "no sm_90a";
  if (gemm_kind(s) != GemmKind::k16Bit) return "not a 16-bit type";
  if (!s.channels_last) return "NCHW";
  if (s.groups != 1 || s.dilation_w != 1) return "groups, or dilated rows";
  if (s.stride_w != 1 && s.stride_w != 2) return "another stride than 1 and 2";
  const int64_t slots = stem_slots(s.stride_w), row_taps = s.s * slots;
  if (s.c >= slots) return "no channel of a padded pixel is free for the bias";
  if (s.r > kStemMaxRows || row_taps > kStemRowTaps) return "a large window";
  const int64_t span = (s.r - 1) * s.dilation_h + 1;
  if (span > kStemRingRows / 2 || s.stride_h > span) return "rows far apart";
  if (s.k % 8 != 0 || addresses.y % 16 != 0) return "TMA stores multiples of 8 channels";
  if (s.q < kStemOutputs / 2) return "short rows";
  if (direction == ConvDirection::kWgrad && s.q % 16 != 0) {
    return "a row is not whole steps of 16 outputs";
  }
  const int64_t steps = s.n * s.p * ceil_div<int64_t>(s.q, kStemOutputs);
  if (steps == 0 || steps * s.stride_h >= int64_t{1} << 30) return "too few or too many rows";
  return nullptr;
}

inline StemConfig choose_stem(ConvDirection direction, const Conv2dShape& s,
                              const DeviceInfo& device) {
  StemShape shape{};
  auto number = [](int64_t value) { return static_cast<int>(value); };
  shape.c = number(s.c), shape.h = number(s.h), shape.w = number(s.w);
  shape.k = number(s.k), shape.r = number(s.r), shape.s = number(s.s);
  shape.p = number(s.p), shape.q = number(s.q);
  shape.stride_h = number(s.stride_h), shape.stride_w = number(s.stride_w);
  shape.pad_h = number(s.pad_h), shape.pad_w = number(s.pad_w);
  shape.dilation_h = number(s.dilation_h);
  shape.span = (shape.r - 1) * shape.dilation_h + 1;
  shape.strips = ceil_div(shape.q, kStemOutputs);
  shape.steps = number(s.n) * shape.p * shape.strips;
  shape.chunks = ceil_div(shape.k, kStemFilters);
  shape.parts = std::clamp(device.num_sms / shape.chunks, 1, shape.steps);
  const int slots = stem_slots(s.stride_w);
  const bool few_rows = s.r <= kStemFewRows && s.s * slots <= stem_row_taps(slots, kStemFewRows);
  return {direction == ConvDirection::kWgrad, few_rows, shape};
}

inline int64_t workspace_bytes(const Conv2dShape& s, const StemConfig& config) {
  return config.is_wgrad ? config.sums() * (s.c * s.taps() + 1) * config.pitch_k() * int64_t{4} : 0;
}

inline std::string describe(const StemConfig& config) {
  std::string text = "sm_90a few-channel kernel, 16-bit wgmma: rows of pixels of " +
                     std::to_string(config.slots()) + " channels in shared memory";
  if (config.is_wgrad) text += ", sums in " + std::to_string(config.sums()) + " parts";
  return text;
}

#ifdef WARPWRIGHT_WITH_CUDA
// T: bf16 or half.
template <class T>
void launch_stem_fprop(const Conv2dParams& params, const StemConfig& config, cudaStream_t stream);
// Writes the parts' sums; launch_direct_wgrad_sum() adds them.
template <class T>
void launch_stem_wgrad(const Conv2dBackwardParams& params, const StemConfig& config,
                       void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
