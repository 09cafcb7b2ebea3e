// conv_transpose2d and conv_transpose2d_backward from tensors to the kernels: checks, CPU, CUDA and
// Meta. autograd.cpp has the layers above: Autograd and Autocast.
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/conv2d/torch/forward.h"
#include "ops/conv_transpose2d/torch/common.h"

namespace warpwright {
namespace {

// ---- checks and shapes ----

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

template <class Int>
void check_transposed_backward(const Tensor& grad_output, const Tensor& input,
                               const std::array<Int, 4>& out) {
  TORCH_CHECK(extents_of<Int>(grad_output).equals(c10::ArrayRef<Int>(out)),
              "conv_transpose2d_backward: grad_output: expected shape ", c10::ArrayRef<Int>(out),
              ", got ", extents_of<Int>(grad_output));
  TORCH_CHECK(grad_output.scalar_type() == input.scalar_type(),
              "conv_transpose2d_backward: grad_output: expected ", input.scalar_type(), ", got ",
              grad_output.scalar_type());
  check_same_device(grad_output, input, "conv_transpose2d_backward: grad_output");
  TORCH_CHECK_NOT_IMPLEMENTED(is_ours(input),
                              "conv_transpose2d_backward: input: expected float32, float64, ",
                              "bfloat16 or float16, got ", input.scalar_type());
}

// The convolution whose input gradient the call is (conv_transpose2d.h). An output padding of a
// stride or more, which a larger dilation allows, has room for more windows than x has pixels: then
// p and q exceed x's extents, and x gets rows and columns of zeros.
Conv2dShape transposed_shape(const Tensor& input, const Tensor& weight, const Sizes4& out,
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
Tensor extended(const Tensor& x, const Conv2dShape& s) {
  const int64_t rows = s.p - x.size(2), columns = s.q - x.size(3);
  if (rows == 0 && columns == 0) return x;
  return at::constant_pad_nd(x, {0, columns, 0, rows});
}

// ---- CPU and CUDA ----

// `run(ConvTranspose2dParams)` computes the output, if it is not empty.
template <class Run>
Tensor conv_transpose2d_with(const Tensor& input_, const Tensor& weight, const Tensor& bias,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef output_padding,
                             int64_t groups, IntArrayRef dilation, Run&& run) {
  check_transposed_types(input_, weight, bias);
  if (!is_ours(input_)) {
    return at::conv_transpose2d(input_, weight, optional_if_defined(bias), stride, padding,
                                output_padding, groups, dilation);
  }
  const Tensor input = batched(input_);
  const auto v =
      expand_transposed_windows<int64_t>(stride, padding, output_padding, groups, dilation);
  const Sizes4 sizes = checked_output_sizes<int64_t>(input, weight, bias, v);
  const auto format = memory_format_of(input, weight);
  const auto options = input.options().memory_format(format);
  if (input.numel() == 0) return at::empty(sizes, options);
  check_has_storage(input, "conv_transpose2d: input");
  check_has_storage(weight, "conv_transpose2d: weight");
  check_has_storage(bias, "conv_transpose2d: bias");
  const Conv2dShape shape = transposed_shape(input, weight, sizes, v, format);
  const Tensor padded = extended(input, shape);
  Tensor output;
  if (input.is_cpu()) output = conv_transpose2d_onednn(shape, padded, weight, bias);
  if (!output.defined()) {
    output = at::empty(sizes, options);
    const Tensor x = in_format(padded, format);
    const Tensor w = in_format(weight, format);
    const Tensor b = bias.defined() ? bias.contiguous() : Tensor();
    run(ConvTranspose2dParams{shape, x.const_data_ptr(), w.const_data_ptr(),
                              b.defined() ? b.const_data_ptr() : nullptr, output.mutable_data_ptr(),
                              shape.c});
    if (input.is_cpu() && b.defined()) output.add_(b.view({-1, 1, 1}));
  }
  return input_.dim() == 3 ? output.squeeze(0) : output;
}

// `run(ConvTranspose2dBackwardParams)` computes the gradients.
template <class Run>
Tensors3 conv_transpose2d_backward_with(const Tensor& grad_output_, const Tensor& input_,
                                        const Tensor& weight, IntArrayRef stride,
                                        IntArrayRef padding, IntArrayRef output_padding,
                                        int64_t groups, IntArrayRef dilation, Conv2dMask mask,
                                        Run&& run) {
  check_transposed_types(input_, weight, Tensor());
  const Tensor input = batched(input_), grad_output = batched(grad_output_);
  const auto v =
      expand_transposed_windows<int64_t>(stride, padding, output_padding, groups, dilation);
  const Sizes4 sizes = checked_output_sizes<int64_t>(input, weight, Tensor(), v);
  check_transposed_backward<int64_t>(grad_output, input, sizes);
  const auto format = memory_format_of(input, weight);
  const auto options = input.options().memory_format(format);
  const bool empty = input.numel() == 0;
  Tensor grad_input, grad_weight, grad_bias;
  if (empty) {
    if (mask[0]) grad_input = at::empty(input.sizes(), options);
    if (mask[1]) grad_weight = at::empty(weight.sizes(), options).zero_();
    if (mask[2]) grad_bias = at::zeros({sizes[1]}, input.options());
  } else if (mask[0] || mask[1] || mask[2]) {
    check_has_storage(grad_output, "conv_transpose2d_backward: grad_output");
    if (mask[1]) check_has_storage(input, "conv_transpose2d_backward: input");
    if (mask[0]) check_has_storage(weight, "conv_transpose2d_backward: weight");
    const Conv2dShape shape = transposed_shape(input, weight, sizes, v, format);
    const Tensor padded = mask[1] ? extended(input, shape) : Tensor();
    std::array<Tensor, 2> native;
    if (input.is_cpu()) {
      if (mask[0]) native[0] = conv2d_onednn(shape, grad_output, weight, std::nullopt);
      if (mask[1]) {
        native[1] =
            conv2d_backward_onednn(shape, padded, grad_output, weight, {false, true, false})[1];
      }
    }
    const bool ours[2] = {mask[0] && !native[0].defined(), mask[1] && !native[1].defined()};
    grad_input = ours[0] ? at::empty({shape.n, shape.k, shape.p, shape.q}, options) : native[0];
    grad_weight = ours[1] ? at::empty(weight.sizes(), options) : native[1];
    if (mask[2]) grad_bias = at::empty({sizes[1]}, input.options());
    if (ours[0] || ours[1] || mask[2]) {
      const Tensor dy = in_format(grad_output, format);
      const Tensor x = ours[1] ? in_format(padded, format) : Tensor();
      const Tensor w = ours[0] ? in_format(weight, format) : Tensor();
      auto in = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
      run(ConvTranspose2dBackwardParams{shape, dy.const_data_ptr(), in(x), in(w),
                                        ours[0] ? grad_input.mutable_data_ptr() : nullptr,
                                        ours[1] ? grad_weight.mutable_data_ptr() : nullptr,
                                        mask[2] ? grad_bias.mutable_data_ptr() : nullptr});
    }
    const bool is_extended = shape.p != input.size(2) || shape.q != input.size(3);
    if (mask[0] && is_extended) {
      grad_input = grad_input.narrow(2, 0, input.size(2)).narrow(3, 0, input.size(3));
      grad_input = grad_input.contiguous(format);
    }
  }
  if (grad_input.defined() && input_.dim() == 3) grad_input = grad_input.squeeze(0);
  return {grad_input, grad_weight, grad_bias};
}

// conv2d's kernels, whose directions are exchanged.
void conv_transpose2d_cpu(const ConvTranspose2dParams& p) {
  Conv2dBackwardParams dgrad{};
  dgrad.shape = p.shape;
  dgrad.grad_output = p.input;
  dgrad.weight = p.weight;
  dgrad.grad_input = p.output;
  conv2d_backward_cpu(dgrad);
}

void conv_transpose2d_backward_cpu(const ConvTranspose2dBackwardParams& p) {
  if (p.grad_input != nullptr) {
    conv2d_cpu({p.shape, p.grad_output, p.weight, /*bias=*/nullptr, p.grad_input});
  }
  Conv2dBackwardParams wgrad{};
  wgrad.shape = p.shape;
  wgrad.grad_output = p.input;
  wgrad.input = p.grad_output;
  wgrad.grad_weight = p.grad_weight;
  if (p.grad_weight != nullptr) conv2d_backward_cpu(wgrad);
  Conv2dBackwardParams sums{};
  sums.shape = bias_shape(p.shape);
  sums.grad_output = p.grad_output;
  sums.grad_bias = p.grad_bias;
  if (p.grad_bias != nullptr) conv2d_backward_cpu(sums);
}

Tensor conv_transpose2d_cpu_kernel(const Tensor& input, const Tensor& weight,
                                   const OptionalTensor& bias, IntArrayRef stride,
                                   IntArrayRef padding, IntArrayRef output_padding, int64_t groups,
                                   IntArrayRef dilation) {
  return conv_transpose2d_with(input, weight, value_or_undefined(bias), stride, padding,
                               output_padding, groups, dilation, conv_transpose2d_cpu);
}
Tensors3 conv_transpose2d_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                              const Tensor& weight, IntArrayRef stride,
                                              IntArrayRef padding, IntArrayRef output_padding,
                                              int64_t groups, IntArrayRef dilation,
                                              Conv2dMask mask) {
  return conv_transpose2d_backward_with(grad_output, input, weight, stride, padding, output_padding,
                                        groups, dilation, mask, conv_transpose2d_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor conv_transpose2d_cuda_kernel(const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, IntArrayRef stride,
                                    IntArrayRef padding, IntArrayRef output_padding, int64_t groups,
                                    IntArrayRef dilation) {
  const CudaCall call(input);
  return conv_transpose2d_with(input, weight, value_or_undefined(bias), stride, padding,
                               output_padding, groups, dilation, [&](ConvTranspose2dParams p) {
                                 p.shape.allow_tf32 = allow_tf32();
                                 p.shape.sm90 = sm90_path_available();
                                 const ConvTranspose2dPlan plan =
                                     choose_conv_transpose2d(p, current_device_info());
                                 const Workspace workspace(plan.workspace_bytes(), input);
                                 launch_conv_transpose2d(p, plan, workspace.data(), call.stream);
                               });
}

Tensors3 conv_transpose2d_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                               const Tensor& weight, IntArrayRef stride,
                                               IntArrayRef padding, IntArrayRef output_padding,
                                               int64_t groups, IntArrayRef dilation,
                                               Conv2dMask mask) {
  const CudaCall call(input);
  return conv_transpose2d_backward_with(
      grad_output, input, weight, stride, padding, output_padding, groups, dilation, mask,
      [&](ConvTranspose2dBackwardParams p) {
        p.shape.allow_tf32 = allow_tf32();
        p.shape.sm90 = sm90_path_available();
        const ConvTranspose2dBackwardPlan plan =
            choose_conv_transpose2d_backward(p, current_device_info());
        const Workspace workspace(plan.workspace_bytes(), input);
        launch_conv_transpose2d_backward(p, plan, workspace.data(), call.stream);
      });
}
#endif

// ---- Meta ----

Tensor conv_transpose2d_meta(const Tensor& input_, const Tensor& weight, const OptionalTensor& bias,
                             SymIntArrayRef stride, SymIntArrayRef padding,
                             SymIntArrayRef output_padding, SymInt groups,
                             SymIntArrayRef dilation) {
  check_transposed_types(input_, weight, value_or_undefined(bias));
  if (!is_ours(input_)) {
    return at::conv_transpose2d_symint(input_, weight, bias, stride, padding, output_padding,
                                       groups, dilation);
  }
  const Tensor input = batched(input_);
  const auto v =
      expand_transposed_windows<SymInt>(stride, padding, output_padding, groups, dilation);
  const auto sizes = checked_output_sizes<SymInt>(input, weight, value_or_undefined(bias), v);
  const Tensor output =
      at::empty_symint(sizes, input.options().memory_format(memory_format_of(input, weight)));
  return input_.dim() == 3 ? output.squeeze(0) : output;
}

Tensors3 conv_transpose2d_backward_meta(const Tensor& grad_output, const Tensor& input_,
                                        const Tensor& weight, SymIntArrayRef stride,
                                        SymIntArrayRef padding, SymIntArrayRef output_padding,
                                        SymInt groups, SymIntArrayRef dilation, Conv2dMask mask) {
  check_transposed_types(input_, weight, Tensor());
  const Tensor input = batched(input_);
  const auto v =
      expand_transposed_windows<SymInt>(stride, padding, output_padding, groups, dilation);
  const auto sizes = checked_output_sizes<SymInt>(input, weight, Tensor(), v);
  check_transposed_backward<SymInt>(batched(grad_output), input, sizes);
  const auto options = input.options().memory_format(memory_format_of(input, weight));
  Tensors3 gradients;
  if (mask[0]) {
    const Tensor grad_input = at::empty_symint(input.sym_sizes(), options);
    std::get<0>(gradients) = input_.dim() == 3 ? grad_input.squeeze(0) : grad_input;
  }
  if (mask[1]) std::get<1>(gradients) = at::empty_symint(weight.sym_sizes(), options);
  if (mask[2]) std::get<2>(gradients) = at::empty_symint({sizes[1]}, input.options());
  return gradients;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv_transpose2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "SymInt[2] padding=0, SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_transpose2d_backward(Tensor grad_output, Tensor input, Tensor weight, "
      "SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, SymInt groups, "
      "SymInt[2] dilation, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv_transpose2d", conv_transpose2d_cpu_kernel);
  m.impl("conv_transpose2d_backward", conv_transpose2d_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv_transpose2d", conv_transpose2d_cuda_kernel);
  m.impl("conv_transpose2d_backward", conv_transpose2d_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv_transpose2d", conv_transpose2d_meta);
  m.impl("conv_transpose2d_backward", conv_transpose2d_backward_meta);
}

}  // namespace warpwright
