// Shared by the files of torch/ (max pooling and its fused forms): the window, output shapes,
// checks, and the two linear ops that every derivative ends in.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <climits>
#include <vector>

#include "ops/max_pool2d/max_pool2d.h"
#include "torch/autograd.h"
#include "torch/checked_math.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

using at::IntArrayRef;
using c10::SymInt;
using c10::SymIntArrayRef;

// ---- window, output shape and checks ----

using IntPair = std::array<int64_t, 2>;  // vertical, horizontal

struct PoolWindow {
  IntPair kernel, stride, padding, dilation;
};

inline IntPair int_pair_of(IntArrayRef values, const char* expectation) {
  TORCH_CHECK(values.size() == 1 || values.size() == 2, "max_pool2d: ", expectation);
  return {values[0], values[values.size() - 1]};
}

inline PoolWindow make_pool_window(IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef dilation) {
  PoolWindow w;
  w.kernel =
      int_pair_of(kernel_size, "kernel_size must either be a single int, or a tuple of two ints");
  w.stride = stride.empty()
                 ? w.kernel
                 : int_pair_of(stride,
                               "stride must either be omitted, a single int, or a tuple of "
                               "two ints");
  w.padding = int_pair_of(padding, "padding must either be a single int, or a tuple of two ints");
  w.dilation =
      int_pair_of(dilation, "dilation must be either a single int, or a tuple of two ints");
  for (const IntPair& values : {w.kernel, w.stride, w.padding, w.dilation}) {
    for (int64_t value : values) {
      TORCH_CHECK(value >= INT_MIN && value <= INT_MAX, "integer out of range");
    }
  }
  return w;
}

// Extent is int64_t or SymInt; the window's numbers have 32 bits. Also rounds down for a negative
// numerator (an image smaller than the window). The caller then reports an output that is too
// small.
template <class Extent>
Extent pooled_extent(const Extent& extent, const PoolWindow& w, int axis, bool ceil_mode) {
  const int64_t kernel = w.kernel[axis], stride = w.stride[axis], pad = w.padding[axis],
                dilation = w.dilation[axis];
  TORCH_CHECK(stride != 0, "stride should not be zero");
  TORCH_CHECK(pad >= 0, "pad must be non-negative, but got pad: ", pad);
  TORCH_CHECK(pad <= ((kernel - 1) * dilation + 1) / 2,
              "pad should be at most half of effective kernel size, but got pad=", pad,
              ", kernel_size=", kernel, " and dilation=", dilation);
  // The rest of the checks on these three needs no extent and belongs before the division.
  TORCH_CHECK(kernel > 0, "kernel size should be greater than zero, but got kH: ", w.kernel[0],
              " kW: ", w.kernel[1]);
  TORCH_CHECK(stride > 0, "stride should be greater than zero, but got dH: ", w.stride[0],
              " dW: ", w.stride[1]);
  TORCH_CHECK(dilation > 0,
              "dilation should be greater than zero, but got dilationH: ", w.dilation[0],
              " dilationW: ", w.dilation[1]);
  const Extent room = checked_add(
      extent, Extent(2 * pad - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0)));
  if (room < 0) return Extent(0);
  Extent result = room / stride + 1;
  // The last window must start inside the image or its left padding.
  if (ceil_mode && (result - 1) * stride >= extent + pad) result = result - 1;
  return result;
}

inline bool is_channels_last(const Tensor& input) {
  return input.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}
inline at::MemoryFormat pool_format(bool channels_last) {
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

template <class Extent>
using PoolSizes = c10::SmallVector<Extent, 4>;

inline void check_pool_dtype(at::ScalarType type) {
  TORCH_CHECK_NOT_IMPLEMENTED(find_dtype(type).has_value(), "\"max_pool2d\" not implemented for '",
                              type, "'");
}
inline void check_pool_floating(at::ScalarType type, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(type), "\"", name, "\" not implemented for '", type, "'");
}

// Checks the call in native's order and returns the output's sizes.
template <class Extent>
PoolSizes<Extent> pooled_sizes(const Tensor& input, c10::ArrayRef<Extent> sizes,
                               const PoolWindow& w, bool ceil_mode) {
  check_pool_dtype(input.scalar_type());
  const size_t dims = sizes.size();
  TORCH_CHECK(dims == 3 || dims == 4,
              "non-empty 3D or 4D (batch mode) tensor expected for input, but got: ", input.dim(),
              "D");
  const Extent height = pooled_extent(sizes[dims - 2], w, 0, ceil_mode);
  const Extent width = pooled_extent(sizes[dims - 1], w, 1, ceil_mode);
  // Only a batch may be empty.
  for (size_t i = dims - 3; i < dims; ++i) {
    TORCH_CHECK(sizes[i] != 0,
                "Expected 3D or 4D (batch mode) tensor with optional 0 dim batch size for input, "
                "but got:",
                input.sym_sizes());
  }
  for (int axis : {0, 1}) {
    TORCH_CHECK(
        w.kernel[axis] / 2 >= w.padding[axis],
        "pad should be smaller than or equal to half of kernel size, but got padW = ", w.padding[1],
        ", padH = ", w.padding[0], ", kW = ", w.kernel[1], ", kH = ", w.kernel[0]);
  }
  TORCH_CHECK(height >= 1 && width >= 1, "Given input size: (", sizes[dims - 3], "x",
              sizes[dims - 2], "x", sizes[dims - 1], "). Calculated output size: (",
              sizes[dims - 3], "x", height, "x", width, "). Output size is too small");
  PoolSizes<Extent> result(sizes.begin(), sizes.end());
  result[dims - 2] = height;
  result[dims - 1] = width;
  return result;
}

inline bool has_small_codes(const PoolWindow& w) {
  return w.kernel[0] * w.kernel[1] <= kMaxSmallTaps;
}
inline at::ScalarType pool_code_type(const PoolWindow& w) {
  return has_small_codes(w) ? at::kByte : at::kInt;
}

// Whether a code can name each tap that a window can have inside the image. Symbolic sizes count as
// large.
inline bool fits_codes(const PoolWindow& w, SymIntArrayRef input_size) {
  int64_t taps = 1;
  for (size_t axis : {0, 1}) {
    const size_t dim = input_size.size() + axis - 2;
    const auto extent = dim < input_size.size() ? input_size[dim].maybe_as_int() : std::nullopt;
    const bool valid = extent && *extent > 0 && *extent <= INT_MAX && w.dilation[axis] > 0;
    taps *= valid ? reachable_taps(w.kernel[axis], *extent, w.padding[axis], w.dilation[axis])
                  : w.kernel[axis];
  }
  return taps <= kMaxLargeTaps;
}

// Checks shared by the readers of codes. Codes with sizes other than the pool's output would make
// them read outside of the image.
inline void check_pool_codes(const char* op, const Tensor& codes, SymIntArrayRef input_size,
                             const PoolWindow& w) {
  TORCH_CHECK(codes.scalar_type() == pool_code_type(w), op, ": codes: expected ", pool_code_type(w),
              " for this kernel_size, got ", codes.scalar_type());
  TORCH_CHECK(codes.dim() == static_cast<int64_t>(input_size.size()) &&
                  (codes.dim() == 3 || codes.dim() == 4),
              op, ": codes: expected as many dimensions as the input (3 or 4), got ", codes.dim(),
              " and ", input_size.size());
  for (int64_t i = 0; i + 2 < codes.dim(); ++i) {
    TORCH_CHECK(codes.sym_size(i) == input_size[i], op, ": codes: expected size ", input_size[i],
                " in dimension ", i, ", got ", codes.sym_size(i));
  }
  for (int axis : {0, 1}) {
    const int64_t dim = codes.dim() + axis - 2;
    const auto extent = input_size[dim].maybe_as_int(), got = codes.sym_size(dim).maybe_as_int();
    if (!extent || !got) continue;
    const int64_t rounded_down = pooled_extent(*extent, w, axis, false);
    TORCH_CHECK(*got == rounded_down || *got == pooled_extent(*extent, w, axis, true), op,
                ": codes: expected size ", rounded_down, " in dimension ", dim,
                " (one more with ceil_mode) for an input of ", *extent, ", got ", *got);
  }
}
inline void check_pooled_shape(const char* op, const char* name, const Tensor& tensor,
                               const Tensor& codes) {
  TORCH_CHECK(tensor.sym_sizes() == codes.sym_sizes(), op, ": ", name, ": expected shape ",
              codes.sym_sizes(), ", got ", tensor.sym_sizes());
  TORCH_CHECK(tensor.device() == codes.device(), op, ": ", name, ": expected device ",
              codes.device(), " as of codes, got ", tensor.device());
}

inline MaxPool2dGeometry pool_geometry(IntArrayRef input, IntArrayRef output, const PoolWindow& w,
                                       bool channels_last) {
  const size_t dims = input.size();
  for (size_t i = dims - 2; i < dims; ++i) {
    TORCH_CHECK(input[i] <= INT_MAX, "integer out of range");
  }
  const int64_t batch = dims == 4 ? input[0] : 1;
  MaxPool2dGeometry g;
  g.images = channels_last ? batch : batch * input[dims - 3];
  g.channels = channels_last ? input[dims - 3] : 1;
  g.height = input[dims - 2];
  g.width = input[dims - 1];
  g.out_height = output[dims - 2];
  g.out_width = output[dims - 1];
  g.kernel_h = w.kernel[0];
  g.kernel_w = w.kernel[1];
  g.stride_h = w.stride[0];
  g.stride_w = w.stride[1];
  g.pad_h = w.padding[0];
  g.pad_w = w.padding[1];
  g.dilation_h = w.dilation[0];
  g.dilation_w = w.dilation[1];
  g.small_codes = has_small_codes(w);
  if (w.kernel[0] * w.kernel[1] > kMaxLargeTaps) {
    g.kernel_h = reachable_taps(g.kernel_h, g.height, g.pad_h, g.dilation_h);
    g.kernel_w = reachable_taps(g.kernel_w, g.width, g.pad_w, g.dilation_w);
  }
  return g;
}

// The same for a call that writes or reads codes.
inline MaxPool2dGeometry code_geometry(const char* op, IntArrayRef input, IntArrayRef output,
                                       const PoolWindow& w, bool channels_last) {
  const MaxPool2dGeometry g = pool_geometry(input, output, w, channels_last);
  TORCH_CHECK(g.taps() <= kMaxLargeTaps, op, ": kernel_size: expected at most ", kMaxLargeTaps,
              " elements of a window inside the padded image, got ", g.kernel_h, " x ", g.kernel_w);
  return g;
}

// ---- derivatives ----

// The ops of max_pool2d/torch/codes.cpp through the dispatcher. With S(x) = the winners of x, as
// recorded in codes: gather computes S(source), backward is its transpose.
Tensor call_max_pool2d_backward(const Tensor& grad_output, const Tensor& codes,
                                SymIntArrayRef input_size, const PoolWindow& w, bool channels_last);
Tensor call_max_pool2d_gather(const Tensor& source, const Tensor& codes, const PoolWindow& w,
                              bool channels_last);

struct MaxPool2dScatter {  // saved: codes
  struct Attributes {
    PoolWindow window;
    std::vector<SymInt> input_size;
    bool channels_last;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    return {call_max_pool2d_backward(grads[0], saved[0], a.input_size, a.window, a.channels_last)};
  }
};

struct MaxPool2dBackward : MaxPool2dScatter {
  static constexpr const char* kName = "WarpwrightMaxPool2DBackward";
  static constexpr bool kPiecewiseLinear = true;
};

}  // namespace warpwright
