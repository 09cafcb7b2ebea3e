// conv_transpose2d's forward from tensors to the kernels' parameters: sizes, layout.
#pragma once

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/empty.h>

#include "ops/conv2d/torch/forward.h"
#include "ops/conv_transpose2d/torch/common.h"

namespace warpwright {

using Sizes4 = std::array<int64_t, 4>;

template <class Int>
c10::ArrayRef<Int> extents_of(const Tensor& tensor) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

template <class Int>
std::array<Int, 4> checked_output_sizes(const Tensor& input, const Tensor& weight,
                                        const Tensor& bias, const TransposedWindows<Int>& v) {
  if (!bias.defined()) {
    return transposed_output_sizes<Int>(extents_of<Int>(input), extents_of<Int>(weight), nullptr,
                                        v);
  }
  const auto sizes = extents_of<Int>(bias);
  return transposed_output_sizes<Int>(extents_of<Int>(input), extents_of<Int>(weight), &sizes, v);
}

// The convolution whose input gradient the call is (conv_transpose2d.h). An output padding of a
// stride or more, which a larger dilation allows, has room for more windows than x has pixels: then
// p and q exceed x's extents, and x gets rows and columns of zeros.
inline Conv2dShape transposed_shape(const Tensor& input, const Tensor& weight, const Sizes4& out,
                                    const TransposedWindows<int64_t>& v, at::MemoryFormat format) {
  const int64_t limit = input.is_cuda() ? kMaxPaddedCuda : kMaxPaddedCpu;
  Conv2dShape s{};
  s.dtype = dtype_of(input);
  s.channels_last = format == at::MemoryFormat::ChannelsLast;
  s.n = out[0], s.c = out[1], s.h = out[2], s.w = out[3];
  s.k = weight.size(0), s.r = weight.size(2), s.s = weight.size(3);
  s.p = input.size(2) + v.output_padding[0] / v.stride[0];
  s.q = input.size(3) + v.output_padding[1] / v.stride[1];
  s.stride_h = v.stride[0], s.stride_w = v.stride[1];
  s.pad_h = v.pad_before[0], s.pad_w = v.pad_before[1];
  s.dilation_h = v.dilation[0], s.dilation_w = v.dilation[1];
  s.groups = v.groups;
  for (int i = 0; i < 2; ++i) {
    const int64_t extent = checked_add(out[i + 2], checked_mul(2, v.pad_before[i]));
    TORCH_CHECK(extent <= limit, "conv_transpose2d: input: expected windows of at most ", limit,
                " rows and columns on ", input.device().type(), ", got ", extent,
                " of an output of ", out[i + 2], " with padding ", v.pad_before[i]);
  }
  fit_windows(s);
  return s;
}

// x with the zeros that transposed_shape() counts.
inline Tensor extended(const Tensor& x, const Conv2dShape& s) {
  const int64_t rows = s.p - x.size(2), columns = s.q - x.size(3);
  if (rows == 0 && columns == 0) return x;
  return at::constant_pad_nd(x, {0, columns, 0, rows});
}

#ifdef WARPWRIGHT_WITH_CUDA
// A dense copy in `format`, if the tensor is not. Native copies a slice of channels element by
// element.
inline Tensor dense_slice(const Tensor& image, at::MemoryFormat format, cudaStream_t stream) {
  const auto pitch = pixel_pitch(image, format);
  if (!pitch) return in_format(image, format);
  const Tensor dense = at::empty(image.sizes(), image.options().memory_format(format));
  const int64_t element = image.element_size(), row = image.size(1) * element;
  const CopyRowsParams copy{.from = image.const_data_ptr(),
                            .to = dense.mutable_data_ptr(),
                            .rows = image.numel() / image.size(1),
                            .row_bytes = row,
                            .from_pitch = *pitch * element,
                            .to_pitch = row,
                            .next_overlaps = false};
  launch_copy_rows(copy, choose_copy_rows(copy), stream);
  return dense;
}
#endif

// ---- the call ----

// The checked arguments of a call with a type of ours.
struct TransposedCall {
  Tensor input;  // batched
  Tensor weight, bias;
  Sizes4 sizes;  // of the output
  at::MemoryFormat format;
  Conv2dShape shape;  // if the output is not empty

  bool is_empty() const { return input.numel() == 0; }
  at::TensorOptions options() const { return input.options().memory_format(format); }

  // The operands in the output's format, for kernels that write it to `output`.
  ConvTranspose2dParams with_output(void* output, int64_t pitch) {
    input = in_format(input, format);
    weight = in_format(weight, format);
    if (bias.defined()) bias = bias.contiguous();
    return {.shape = shape,
            .input = input.const_data_ptr(),
            .weight = weight.const_data_ptr(),
            .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
            .output = output,
            .pitch = pitch,
            .after_copy = false};
  }
};

inline TransposedCall transposed_call(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                      IntArrayRef stride, IntArrayRef padding,
                                      IntArrayRef output_padding, int64_t groups,
                                      IntArrayRef dilation) {
  TransposedCall call{.input = batched(input), .weight = weight, .bias = bias};
  const auto v =
      expand_transposed_windows<int64_t>(stride, padding, output_padding, groups, dilation);
  call.sizes = checked_output_sizes<int64_t>(call.input, weight, bias, v);
  call.format = memory_format_of(call.input, weight);
  if (call.is_empty()) return call;
  check_has_storage(input, "conv_transpose2d: input");
  check_has_storage(weight, "conv_transpose2d: weight");
  check_has_storage(bias, "conv_transpose2d: bias");
  call.shape = transposed_shape(call.input, weight, call.sizes, v, call.format);
  call.input = extended(call.input, call.shape);
  return call;
}

// `run(ConvTranspose2dParams)` computes the output, if it is not empty.
template <class Run>
Tensor conv_transpose2d_with(const Tensor& input, const Tensor& weight, const Tensor& bias,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef output_padding,
                             int64_t groups, IntArrayRef dilation, Run&& run) {
  check_transposed_types(input, weight, bias);
  if (!is_ours(input)) {
    return at::conv_transpose2d(input, weight, optional_if_defined(bias), stride, padding,
                                output_padding, groups, dilation);
  }
  TransposedCall call =
      transposed_call(input, weight, bias, stride, padding, output_padding, groups, dilation);
  if (call.is_empty()) return at::empty(call.sizes, call.options());
  Tensor output;
  if (input.is_cpu()) output = conv_transpose2d_onednn(call.shape, call.input, weight, bias);
  if (!output.defined()) {
    output = at::empty(call.sizes, call.options());
    run(call.with_output(output.mutable_data_ptr(), call.shape.c));
    if (input.is_cpu() && bias.defined()) output.add_(bias.view({-1, 1, 1}));
  }
  return input.dim() == 3 ? output.squeeze(0) : output;
}

}  // namespace warpwright
