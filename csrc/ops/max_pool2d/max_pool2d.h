// max_pool2d: NaN propagates, the first maximum of a window wins, the last NaN wins.
// The backward does not need an int64 index (8 bytes per output). It needs the winner's place in
// its window, one byte for windows of up to 255 taps. The backward gathers: each input element
// reads the windows that cover it and is written once, without zero fill or atomics, in a fixed
// order. A code or index from the caller may name a tap outside of the image. The readers compare a
// code with the existing taps, or check the place that it names: such a code has no winner. Bytes
// (E = input, O = output, C = codes): forward E + O + C, backward C + O + E.
//
// A relu before the pool changes the start of a window's maximum from -inf to 0, which is no tap's.
// NaN still wins, and the zero of a window without a positive tap is +0.
//
// Both layouts are one: NCHW is NHWC with N*C images of one channel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// Input (images, height, width, channels), output (images, out_height, out_width, channels).
struct MaxPool2dGeometry {
  int64_t images, channels;
  int64_t height, width;
  int64_t out_height, out_width;
  int64_t kernel_h, kernel_w;
  int64_t stride_h, stride_w;
  int64_t pad_h, pad_w;
  int64_t dilation_h, dilation_w;
  bool small_codes;  // SmallCode, else LargeCode: from the window as the caller gave it

  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t out_numel() const { return images * out_height * out_width * channels; }
  int64_t in_numel() const { return images * height * width * channels; }
};

// A code is tap_h * kernel_w + tap_w of the winner, or kNoTap. A window has no winner if no tap is
// inside the image (ceil_mode with dilation makes such windows). After a relu, a window without a
// positive tap has none either, because the relu stops its gradient.
using SmallCode = uint8_t;  // windows of up to kMaxSmallTaps taps
using LargeCode = int32_t;
constexpr int64_t kMaxSmallTaps = 255;
constexpr int64_t kMaxLargeTaps = INT32_MAX;
template <class Code>
constexpr Code kNoTap = static_cast<Code>(-1);

// Taps of one direction that are inside the image for some window. A window begins at -pad or
// later.
inline int64_t reachable_taps(int64_t kernel, int64_t extent, int64_t pad, int64_t dilation) {
  return std::min(kernel, (extent + pad - 1) / dilation + 1);
}

struct MaxPool2dParams {
  DType dtype;
  MaxPool2dGeometry geometry;
  bool relu;          // max_pool2d(relu(input))
  const void* input;  // (images, height, width, channels)
  void* output;       // (images, out_height, out_width, channels)
  void* codes;        // same shape, SmallCode or LargeCode; null: not wanted
};

struct MaxPool2dBackwardParams {
  DType dtype;
  MaxPool2dGeometry geometry;
  const void* grad_output;  // (images, out_height, out_width, channels)
  const void* codes;        // same shape
  void* grad_input;         // (images, height, width, channels), every element is written
};

// output[o] = source[winner of o], 0 where there is none: the backward's transpose.
struct MaxPool2dGatherParams {
  DType dtype;
  MaxPool2dGeometry geometry;
  const void* source;  // (images, height, width, channels)
  const void* codes;   // (images, out_height, out_width, channels)
  void* output;        // same shape
};

struct MaxPool2dIndicesParams {
  MaxPool2dGeometry geometry;
  const void* codes;  // (images, out_height, out_width, channels)
  int64_t* indices;   // same shape: h * width + w of the winner
};

// The elements of a row that a thread of the unrolled kernels has. This is one output and the
// inputs of its window, or for one channel several neighbours or a single element.
enum class PoolSpan {
  kColumn,    // one output, a vector of channels
  kPlane,     // one output forward, one input backward: neighbours are the next thread's
  kPairs,     // one output of a 2x2 window, the two inputs above it in one access
  kWide,      // as many outputs as belong to 16 bytes of inputs, without left padding
  kWideLeft,  // the same with a padding of 1 left and above
  kWideRow,   // kWide of one row of 2x2 windows that tile the image: a warp's stores are one run
};
constexpr bool is_wide(PoolSpan span) {
  return span == PoolSpan::kPairs || span == PoolSpan::kWide || span == PoolSpan::kWideLeft ||
         span == PoolSpan::kWideRow;
}

// How the CUDA kernels run a case; a pure function of shape and alignment.
struct MaxPool2dPlan {
  int vec;     // channels per access
  int window;  // 2 or 3: kernel 2x2 or 3x3, stride 2, dilation 1, unrolled; 0: any window
  PoolSpan span;
  const char* reason;
};

// `addresses`: bitwise or of every element pointer of the call, as integers.
inline MaxPool2dPlan choose_max_pool2d(const MaxPool2dGeometry& g, DType dtype,
                                       uintptr_t addresses) {
  const int64_t size = dtype_size(dtype);
  const int64_t vec = 16 / size;
  const bool stride_2 =
      g.stride_h == 2 && g.stride_w == 2 && g.dilation_h == 1 && g.dilation_w == 1;
  int window = 0;
  if (g.small_codes && stride_2 && g.kernel_h == 2 && g.kernel_w == 2) window = 2;
  if (g.small_codes && stride_2 && g.kernel_h == 3 && g.kernel_w == 3) window = 3;
  if (g.channels % vec == 0 && addresses % 16 == 0) {
    return {static_cast<int>(vec), window, PoolSpan::kColumn, "16 bytes of channels per thread"};
  }
  if (g.channels != 1) {
    return {1, window, PoolSpan::kColumn, "channels or addresses are no multiple of 16 bytes"};
  }
  // With two inputs per column of outputs, every row of both starts at a vector.
  const bool halves = g.width == 2 * g.out_width;
  if (window != 0 && halves && g.width % vec == 0 && addresses % 16 == 0) {
    constexpr const char* reason = "one channel: 16 bytes of neighbours per thread";
    const bool tiles = window == 2 && g.pad_h == 0 && g.pad_w == 0 && g.height == 2 * g.out_height;
    if (tiles && g.width * size % 32 != 0) {
      // Rows share sectors: the halves of one are read and written together.
      return {1, window, PoolSpan::kWideRow,
              "one channel: 16 bytes of neighbours per thread, by rows"};
    }
    if (g.pad_w == 0) return {1, window, PoolSpan::kWide, reason};
    if (window == 3 && g.pad_h == 1) return {1, window, PoolSpan::kWideLeft, reason};
  }
  if (window == 2 && halves && g.pad_w == 0 && addresses % (2 * size) == 0) {
    return {1, window, PoolSpan::kPairs, "one channel: pairs of neighbours per thread"};
  }
  // The backward has two neighbouring windows per thread and 32-bit offsets.
  constexpr int64_t kMaxImage = int64_t{1} << 31;
  if (window != 0 && g.out_width >= 2 && g.height * g.width < kMaxImage &&
      g.out_height * g.out_width < kMaxImage) {
    return {1, window, PoolSpan::kPlane, "one channel: an element of a row per thread"};
  }
  return {1, window, PoolSpan::kColumn, "one channel: an output and its inputs per thread"};
}

inline std::string describe(const MaxPool2dPlan& plan) {
  const char* window = plan.window == 2   ? "2x2 windows unrolled"
                       : plan.window == 3 ? "3x3 windows unrolled"
                                          : "any window";
  return "max_pool2d, " + std::to_string(plan.vec) + " channel(s) per access, " + window + ": " +
         plan.reason;
}

// `more`: bitwise or of the pointers that a fused form also accesses.
inline MaxPool2dPlan choose_max_pool2d(const MaxPool2dParams& p, uintptr_t more = 0) {
  return choose_max_pool2d(p.geometry, p.dtype, addresses_of(p.input, p.output, p.codes) | more);
}
inline MaxPool2dPlan choose_max_pool2d_backward(const MaxPool2dBackwardParams& p,
                                                uintptr_t more = 0) {
  return choose_max_pool2d(p.geometry, p.dtype,
                           addresses_of(p.grad_output, p.codes, p.grad_input) | more);
}

void max_pool2d_cpu(const MaxPool2dParams& params);
void max_pool2d_backward_cpu(const MaxPool2dBackwardParams& params);
void max_pool2d_gather_cpu(const MaxPool2dGatherParams& params);
void max_pool2d_indices_cpu(const MaxPool2dIndicesParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_max_pool2d(const MaxPool2dParams& params, const MaxPool2dPlan& plan,
                       cudaStream_t stream);
void launch_max_pool2d_backward(const MaxPool2dBackwardParams& params, const MaxPool2dPlan& plan,
                                cudaStream_t stream);
void launch_max_pool2d_gather(const MaxPool2dGatherParams& params, cudaStream_t stream);
void launch_max_pool2d_indices(const MaxPool2dIndicesParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
