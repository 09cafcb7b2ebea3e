// conv_transpose2d and conv_transpose2d_backward from tensors to the kernels: checks, CPU, CUDA and
// Meta. autograd.cpp has the layers above: Autograd and Autocast.
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "ops/conv_transpose2d/torch/forward.h"

namespace warpwright {
namespace {

// ---- CPU and CUDA ----

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

// `run(grad_output, format, ConvTranspose2dBackwardParams)` computes the gradients. If it reads
// grad_output in another layout than the parameters say, it makes it dense in the format.
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
      const Tensor x = ours[1] ? in_format(padded, format) : Tensor();
      const Tensor w = ours[0] ? in_format(weight, format) : Tensor();
      auto in = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
      run(grad_output, format,
          {.shape = shape,
           .grad_output = grad_output.const_data_ptr(),
           .pitch = pixel_pitch(grad_output, format).value_or(shape.c),
           .input = in(x),
           .weight = in(w),
           .grad_input = ours[0] ? grad_input.mutable_data_ptr() : nullptr,
           .grad_weight = ours[1] ? grad_weight.mutable_data_ptr() : nullptr,
           .grad_bias = mask[2] ? grad_bias.mutable_data_ptr() : nullptr});
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

void conv_transpose2d_backward_cpu(const Tensor& grad_output, at::MemoryFormat format,
                                   ConvTranspose2dBackwardParams p) {
  const Tensor dense = in_format(grad_output, format);
  p.grad_output = dense.const_data_ptr();
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
      [&](const Tensor& grad, at::MemoryFormat format, ConvTranspose2dBackwardParams p) {
        p.shape.allow_tf32 = allow_tf32();
        p.shape.sm90 = sm90_path_available();
        const DeviceInfo& device = current_device_info();
        Tensor dense = grad;
        if (!p.is_pitched() || why_not_pitched(p, device) != nullptr) {
          dense = dense_slice(grad, format, call.stream);
          p.grad_output = dense.const_data_ptr();
          p.pitch = p.shape.c;
        }
        const ConvTranspose2dBackwardPlan plan = choose_conv_transpose2d_backward(p, device);
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
