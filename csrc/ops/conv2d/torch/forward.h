// conv2d's forward from tensors to the kernels' parameters: checks, output shape, layout.
#pragma once

#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/conv2d/conv2d.h"
#include "ops/conv2d/plan.h"
#include "ops/conv2d/torch/common.h"
#include "torch/checks.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <ATen/Context.h>

#include "host/sm90.h"
#include "torch/cuda.h"
#endif

namespace warpwright {

using at::IntArrayRef;

// ---- checks and output shape: in native's order and words ----

inline void check_types(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(input.dim() == 3 || input.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: ",
              input.sym_sizes());
  const bool biased = bias.has_value() && bias->defined();
  TORCH_CHECK(!biased || bias->dtype() == input.dtype(), "Input type (", input.dtype().name(),
              ") and bias type (", biased ? bias->dtype().name() : "", ") should be the same");
  TORCH_CHECK(weight.dim() >= 3, "weight should have at least three dimensions");
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), "Input type (", input.toString(),
              ") and weight type (", weight.toString(), ") should be the same");
  for (const Tensor* other : {&weight, biased ? &*bias : &weight}) {
    TORCH_CHECK(other->device() == input.device(),
                "Expected all tensors to be on the same device, ",
                "but found at least two devices, ", input.device(), " and ", other->device(), "!");
  }
}

template <class Int>
Int padded_extent(const Int& extent, const Conv2dWindows<Int>& v, int axis) {
  return checked_add(checked_add(extent, v.pad_before[axis]), v.pad_after[axis]);
}

// Sizes of the output of a batched convolution; throws if native does. `sizes` gives a tensor's
// extents as Int.
template <class Int, class Sizes>
std::array<Int, 4> output_sizes(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const Conv2dWindows<Int>& v,
                                Sizes&& sizes) {
  const auto x = sizes(input);
  const auto w = sizes(weight);
  TORCH_CHECK(w.size() == 4, "expected stride to be a single integer value or a list of ",
              w.size() - 2, " values to match the convolution dimensions, but got stride=[",
              v.stride[0], ", ", v.stride[1], "]");
  TORCH_CHECK(w[0] >= v.groups, "Given groups=", v.groups, ", expected weight to be at least ",
              v.groups, " at dimension 0, but got weight of size ", w, " instead");
  TORCH_CHECK(w[0] % v.groups == 0, "Given groups=", v.groups,
              ", expected weight to be divisible by ", v.groups,
              " at dimension 0, but got weight of size [", w, "] instead");
  TORCH_CHECK(x[1] == checked_mul(w[1], v.groups), "Given groups=", v.groups, ", weight of size ",
              w, ", expected input", x, " to have ", w[1] * v.groups, " channels, but got ", x[1],
              " channels instead");
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK(bias->dim() == 1 && sizes(*bias)[0] == w[0], "Given weight of size ", w,
                ", expected bias to be 1-dimensional with ", w[0],
                " elements, but got bias of size ", sizes(*bias), " instead");
  }
  TORCH_CHECK(w[2] > 0 && w[3] > 0, "weight: expected a kernel of at least one element, got (",
              w[2], " x ", w[3], ")");
  Int padded[2], kernel[2];
  for (int i = 0; i < 2; ++i) {
    padded[i] = padded_extent(Int(x[i + 2]), v, i);
    kernel[i] = checked_add(checked_mul(v.dilation[i], w[i + 2] - 1), Int(1));
  }
  TORCH_CHECK(padded[0] >= kernel[0] && padded[1] >= kernel[1],
              "Calculated padded input size per channel: (", padded[0], " x ", padded[1],
              "). Kernel size: (", kernel[0], " x ", kernel[1],
              "). Kernel size can't be greater than actual input size");
  if (x[0] != 0 && x[1] != 0) {
    TORCH_CHECK(x[2] != 0 && x[3] != 0,
                "Only zero batch or zero channel inputs are supported, but got input shape: ", x);
  }
  // Native's rule: without input channels there are no output channels either.
  return {x[0], x[1] == 0 ? Int(0) : w[0], (padded[0] - kernel[0]) / v.stride[0] + 1,
          (padded[1] - kernel[1]) / v.stride[1] + 1};
}

inline const auto int_sizes = [](const Tensor& tensor) { return tensor.sizes(); };
inline const auto sym_sizes = [](const Tensor& tensor) { return tensor.sym_sizes(); };

// Native's rule: channels_last if the input or the weight is.
inline at::MemoryFormat memory_format_of(const Tensor& input, const Tensor& weight) {
  const bool last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                    weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// A dense copy in `format`, if the tensor is not. Native's copy between formats takes five times as
// long as one read and one write.
inline Tensor in_format(const Tensor& tensor, at::MemoryFormat format) {
  if (tensor.is_contiguous(format)) return tensor;
#ifdef WARPWRIGHT_WITH_CUDA
  const bool to_rows = format == at::MemoryFormat::ChannelsLast;
  const auto other = to_rows ? at::MemoryFormat::Contiguous : at::MemoryFormat::ChannelsLast;
  const int64_t element = tensor.element_size();
  const LayoutTensor layout{tensor.size(0), tensor.size(1), tensor.size(2) * tensor.size(3),
                            element};
  const void* from = tensor.const_data_ptr();
  if (tensor.is_cuda() && (element == 2 || element == 4) && tensor.is_contiguous(other) &&
      layout.can_change() && (to_rows || address_of(from) % 16 == 0)) {
    Tensor copy = at::empty(tensor.sizes(), tensor.options().memory_format(format));
    const CudaCall call(tensor);
    const auto launch = to_rows ? launch_planes_to_rows : launch_rows_to_planes;
    launch(layout, from, copy.mutable_data_ptr(), call.stream);
    return copy;
  }
#endif
  return tensor.contiguous(format);
}

inline Tensor batched(const Tensor& input) { return input.dim() == 3 ? input.unsqueeze(0) : input; }

// ---- the call ----

inline Conv2dShape shape_of(const Tensor& input, const Tensor& weight,
                            const std::array<int64_t, 4>& out, const Conv2dWindows<int64_t>& v,
                            at::MemoryFormat format) {
  const int64_t limit = input.is_cuda() ? kMaxPaddedCuda : kMaxPaddedCpu;
  for (int i = 0; i < 2; ++i) {
    const int64_t padded = padded_extent(input.size(i + 2), v, i);
    TORCH_CHECK(padded <= limit, "conv2d: padding: expected at most ", limit,
                " padded rows and columns on ", input.device().type(), ", got ", padded,
                " of an extent of ", input.size(i + 2), " with padding ", v.pad_before[i], " and ",
                v.pad_after[i]);
  }
  Conv2dShape shape{};
  shape.dtype = dtype_of(input);
  shape.channels_last = format == at::MemoryFormat::ChannelsLast;
  shape.n = input.size(0);
  shape.c = input.size(1);
  shape.h = input.size(2);
  shape.w = input.size(3);
  shape.k = weight.size(0);
  shape.r = weight.size(2);
  shape.s = weight.size(3);
  shape.p = out[2];
  shape.q = out[3];
  shape.stride_h = v.stride[0];
  shape.stride_w = v.stride[1];
  shape.pad_h = v.pad_before[0];
  shape.pad_w = v.pad_before[1];
  shape.dilation_h = v.dilation[0];
  shape.dilation_w = v.dilation[1];
  shape.groups = v.groups;
  fit_windows(shape);
  return shape;
}

// `run(Conv2dParams)` computes the output, if it is not empty.
template <class Run>
Tensor conv2d_with(const Tensor& input_, const Tensor& weight, const OptionalTensor& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                   Run&& run) {
  check_types(input_, weight, bias);
  if (!is_ours(input_)) {
    return at::conv2d(input_, weight, bias, stride, padding, dilation, groups);
  }
  const Tensor input = batched(input_);
  const auto v = expand_windows<int64_t>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<int64_t>(input, weight, bias, v, int_sizes);
  const auto format = memory_format_of(input, weight);
  const auto options = input.options().memory_format(format);
  Tensor output;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    output = at::empty(sizes, options);
  } else {
    check_has_storage(input, "conv2d: input");
    check_has_storage(weight, "conv2d: weight");
    check_has_storage(value_or_undefined(bias), "conv2d: bias");
    const Conv2dShape shape = shape_of(input, weight, sizes, v, format);
    if (input.is_cpu()) output = conv2d_onednn(shape, input, weight, bias);
    if (!output.defined()) {
      output = at::empty(sizes, options);
      const Tensor x = in_format(input, format);
      const Tensor w = in_format(weight, format);
      const Tensor b = value_or_undefined(bias).defined() ? bias->contiguous() : Tensor();
      run(Conv2dParams{shape, x.const_data_ptr(), w.const_data_ptr(),
                       b.defined() ? b.const_data_ptr() : nullptr, output.mutable_data_ptr()});
    }
  }
  return input_.dim() == 3 ? output.squeeze(0) : output;
}

#ifdef WARPWRIGHT_WITH_CUDA
// float32 on tensor cores, as native decides: torch.backends.cudnn.conv.fp32_precision or
// allow_tf32 are for cuDNN. Without cuDNN (torch.backends.cudnn.enabled) native computes IEEE
// float32.
inline bool allow_tf32() {
  const at::Context& context = at::globalContext();
  return context.userEnabledCuDNN() && context.allowTF32CuDNN(at::Float32Op::CONV);
}
#endif

}  // namespace warpwright
