// Shared by the files of torch/: windows, checks and sizes of a transposed convolution, and the ops
// through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "ops/conv2d/torch/common.h"
#include "ops/conv_transpose2d/conv_transpose2d.h"

namespace warpwright {

// Arguments after the tensors.
struct ConvTranspose2dGeometry {
  std::vector<SymInt> stride, padding, output_padding, dilation;
  SymInt groups;
};

namespace call {

inline Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const Tensor& bias,
                               const ConvTranspose2dGeometry& g) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, SymIntArrayRef,
                     SymIntArrayRef, SymIntArrayRef, SymInt, SymIntArrayRef)>(
          "warpwright::conv_transpose2d");
  return op.call(input, weight, optional_if_defined(bias), g.stride, g.padding, g.output_padding,
                 g.groups, g.dilation);
}

inline Tensors3 conv_transpose2d_backward(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& weight, const ConvTranspose2dGeometry& g,
                                          Conv2dMask mask) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef, SymIntArrayRef,
                       SymIntArrayRef, SymInt, SymIntArrayRef, Conv2dMask)>(
          "warpwright::conv_transpose2d_backward");
  return op.call(grad_output, input, weight, g.stride, g.padding, g.output_padding, g.groups,
                 g.dilation, mask);
}

inline Tensor conv_transpose2d_cat(const Tensor& skip, const Tensor& input, const Tensor& weight,
                                   const Tensor& bias, const ConvTranspose2dGeometry& g,
                                   bool skip_first) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                     SymIntArrayRef, SymIntArrayRef, SymIntArrayRef, SymInt, SymIntArrayRef, bool)>(
          "warpwright::conv_transpose2d_cat");
  return op.call(skip, input, weight, optional_if_defined(bias), g.stride, g.padding,
                 g.output_padding, g.groups, g.dilation, skip_first);
}

}  // namespace call

inline ConvTranspose2dGeometry transposed_geometry(SymIntArrayRef stride, SymIntArrayRef padding,
                                                   SymIntArrayRef output_padding, SymInt groups,
                                                   SymIntArrayRef dilation) {
  return {stride.vec(), padding.vec(), output_padding.vec(), dilation.vec(), std::move(groups)};
}

// ---- windows: in native's order and words ----

template <class Int>
struct TransposedWindows : Conv2dWindows<Int> {
  Int output_padding[2];
};

template <class Int>
TransposedWindows<Int> expand_transposed_windows(c10::ArrayRef<Int> stride,
                                                 c10::ArrayRef<Int> padding,
                                                 c10::ArrayRef<Int> output_padding, Int groups,
                                                 c10::ArrayRef<Int> dilation) {
  TORCH_CHECK(padding.size() <= 2,
              "expected padding to be a single integer value or a list of 2 values to match the "
              "convolution dimensions, but got padding=",
              padding);
  TransposedWindows<Int> v{expand_windows<Int>(stride, padding, dilation, groups), {}};
  expand_pair("output_padding", output_padding, v.output_padding);
  for (const Int& rows : v.output_padding) {
    TORCH_CHECK(rows >= 0, "negative output_padding is not supported");
  }
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.output_padding[i] < v.stride[i] || v.output_padding[i] < v.dilation[i],
                "output padding must be smaller than either stride or dilation, but got ",
                "output_padding_height: ", v.output_padding[0],
                " output_padding_width: ", v.output_padding[1], " stride_height: ", v.stride[0],
                " stride_width: ", v.stride[1], " dilation_height: ", v.dilation[0],
                " dilation_width: ", v.dilation[1]);
  }
  return v;
}

inline void check_transposed_types(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  TORCH_CHECK(input.dim() == 3 || input.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got input of "
              "size: ",
              input.sym_sizes());
  TORCH_CHECK(weight.dim() >= 3, "weight should have at least three dimensions");
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), "Input type (", input.toString(),
              ") and weight type (", weight.toString(), ") should be the same");
  TORCH_CHECK(!bias.defined() || bias.scalar_type() == input.scalar_type(), "Input type (",
              input.toString(), ") and bias type (", bias.defined() ? bias.toString() : "",
              ") should be the same");
  for (const Tensor* other : {&weight, bias.defined() ? &bias : &weight}) {
    TORCH_CHECK(other->device() == input.device(),
                "Expected all tensors to be on the same device, ",
                "but found at least two devices, ", input.device(), " and ", other->device(), "!");
  }
}

// Sizes of the output of a batched call; throws if native does. `x`, `w`, `bias`: sizes; `bias` may
// be null.
template <class Int>
std::array<Int, 4> transposed_output_sizes(c10::ArrayRef<Int> x, c10::ArrayRef<Int> w,
                                           const c10::ArrayRef<Int>* bias,
                                           const TransposedWindows<Int>& v) {
  TORCH_CHECK(w.size() == 4, "expected stride to be a single integer value or a list of ",
              w.size() - 2, " values to match the convolution dimensions, but got stride=[",
              v.stride[0], ", ", v.stride[1], "]");
  TORCH_CHECK(w[0] >= v.groups, "Given groups=", v.groups, ", expected weight to be at least ",
              v.groups, " at dimension 0, but got weight of size ", w, " instead");
  TORCH_CHECK(w[0] % v.groups == 0, "Given groups=", v.groups,
              ", expected weight to be divisible by ", v.groups,
              " at dimension 0, but got weight of size [", w, "] instead");
  TORCH_CHECK(x[1] == w[0], "Given transposed=1, weight of size ", w, ", expected input", x,
              " to have ", w[0], " channels, but got ", x[1], " channels instead");
  const Int channels = checked_mul(w[1], v.groups);
  if (bias != nullptr) {
    TORCH_CHECK(bias->size() == 1 && (*bias)[0] == channels, "Given transposed=1, weight of size ",
                w, ", expected bias to be 1-dimensional with ", channels,
                " elements, but got bias of size ", *bias, " instead");
  }
  TORCH_CHECK(w[2] > 0 && w[3] > 0, "kernel size should be greater than zero, but got ",
              "kernel_height: ", w[2], " kernel_width: ", w[3]);
  TORCH_CHECK(w[1] > 0, "non-empty 2D or 4D weight tensor expected, but got: ", w);
  if (x[0] != 0) {
    TORCH_CHECK(x[2] != 0 && x[3] != 0,
                "Only zero batch or zero channel inputs are supported, but got input shape: ", x);
  }
  Int extent[2];
  for (int i = 0; i < 2; ++i) {
    const Int windows = checked_add(checked_mul(x[i + 2] - 1, v.stride[i]),
                                    checked_mul(v.dilation[i], w[i + 2] - 1));
    extent[i] = checked_add(checked_add(windows, v.output_padding[i]), Int(1));
    extent[i] = checked_add(extent[i], checked_mul(v.pad_before[i], Int(-2)));
  }
  TORCH_CHECK(extent[0] > 0 && extent[1] > 0, "Given input size per channel: (", x[2], " x ", x[3],
              "). Calculated output size per channel: (", extent[0], " x ", extent[1],
              "). Output size is too small");
  return {x[0], channels, extent[0], extent[1]};
}

// Elements between the pixels of a slice of channels of a channels-last image; none if it is dense
// in `format`, or no such slice.
inline std::optional<int64_t> pixel_pitch(const Tensor& image, at::MemoryFormat format) {
  if (format != at::MemoryFormat::ChannelsLast || image.dim() != 4) return std::nullopt;
  if (image.numel() == 0 || image.is_contiguous(format)) return std::nullopt;
  const int64_t n = image.size(0), c = image.size(1), h = image.size(2), w = image.size(3);
  const int64_t pitch = w > 1   ? image.stride(3)
                        : h > 1 ? image.stride(2)
                        : n > 1 ? image.stride(0)
                                : c;
  const bool is_slice = pitch > c && (c == 1 || image.stride(1) == 1) &&
                        (h == 1 || image.stride(2) == w * pitch) &&
                        (n == 1 || image.stride(0) == h * w * pitch);
  return is_slice ? std::optional<int64_t>(pitch) : std::nullopt;
}

// In onednn.cpp: the output, if native's kernel should compute it; otherwise undefined.
Tensor conv_transpose2d_onednn(const Conv2dShape& shape, const Tensor& input, const Tensor& weight,
                               const Tensor& bias);

}  // namespace warpwright
