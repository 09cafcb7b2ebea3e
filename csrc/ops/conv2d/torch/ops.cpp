// conv2d and conv2d_backward from tensors to the kernels: checks, CPU, CUDA and Meta. autograd.cpp
// has the layers above: Autograd, padding given as a word, Autocast.
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "ops/conv2d/torch/forward.h"

namespace warpwright {
namespace {

// ---- CPU and CUDA ----

template <class Int, class Sizes>
void check_conv2d_backward(const Tensor& grad_output, const Tensor& input,
                           const std::array<Int, 4>& out, bool float32_parameters, Sizes&& sizes) {
  TORCH_CHECK(sizes(grad_output).equals(c10::ArrayRef<Int>(out)),
              "conv2d_backward: grad_output: expected shape ", c10::ArrayRef<Int>(out), ", got ",
              sizes(grad_output));
  TORCH_CHECK(grad_output.scalar_type() == input.scalar_type(),
              "conv2d_backward: grad_output: expected ", input.scalar_type(), ", got ",
              grad_output.scalar_type());
  check_same_device(grad_output, input, "conv2d_backward: grad_output");
  TORCH_CHECK_NOT_IMPLEMENTED(is_ours(input), "conv2d_backward: input: expected float32, float64, ",
                              "bfloat16 or float16, got ", input.scalar_type());
  TORCH_CHECK(!float32_parameters || is_16bit(input.scalar_type()),
              "conv2d_backward: float32_parameters: expected 16-bit operands, got ",
              input.scalar_type());
}

// `addend`: undefined, or to be added to the input's gradient.
void check_addend(const Tensor& addend, const Tensor& input, const Conv2dMask& mask) {
  if (!addend.defined()) return;
  TORCH_CHECK(mask[0], "conv2d_backward: addend: expected none without the gradient of the input");
  TORCH_CHECK(addend.sym_sizes().equals(input.sym_sizes()),
              "conv2d_backward: addend: expected shape ", input.sym_sizes(), ", got ",
              addend.sym_sizes());
  TORCH_CHECK(addend.scalar_type() == input.scalar_type(), "conv2d_backward: addend: expected ",
              input.scalar_type(), ", got ", addend.scalar_type());
  check_same_device(addend, input, "conv2d_backward: addend");
}

// Of weight and bias; undefined ones are not wanted.
struct ParameterGradients {
  Tensor weight, bias;

  ParameterGradients in_type(at::ScalarType type) const {
    return map([&](const Tensor& gradient) { return gradient.to(type); });
  }
  // Others to be written.
  ParameterGradients empty_in_type(at::ScalarType type) const {
    return map([&](const Tensor& gradient) {
      return at::empty_like(gradient, gradient.options().dtype(type));
    });
  }
  void set_arguments(Conv2dBackwardParams& p) const {
    p.grad_weight = weight.defined() ? weight.mutable_data_ptr() : nullptr;
    p.grad_bias = bias.defined() ? bias.mutable_data_ptr() : nullptr;
    const Tensor& any = weight.defined() ? weight : bias;
    p.float32_parameters = any.defined() && dtype_of(any) != p.shape.dtype;
  }

 private:
  template <class F>
  ParameterGradients map(F&& f) const {
    return {weight.defined() ? f(weight) : weight, bias.defined() ? f(bias) : bias};
  }
};

// run(Conv2dBackwardParams, ParameterGradients&) computes the gradients, and returns whether it has
// added the addend. It may exchange the gradients of the parameters for tensors of the input's
// type, which are widened after it.
template <class Run>
Tensors3 conv2d_backward_with(const Tensor& grad_output_, const Tensor& input_,
                              const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                              IntArrayRef dilation, int64_t groups, Conv2dMask mask,
                              const OptionalTensor& addend_, bool float32_parameters, Run&& run) {
  check_types(input_, weight, std::nullopt);
  const Tensor input = batched(input_);
  const Tensor grad_output = batched(grad_output_);
  const auto v = expand_windows<int64_t>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<int64_t>(input, weight, std::nullopt, v, int_sizes);
  check_conv2d_backward<int64_t>(grad_output, input, sizes, float32_parameters, int_sizes);
  Tensor addend = value_or_undefined(addend_);
  check_addend(addend, input_, mask);
  if (addend.defined()) addend = batched(addend);
  const auto format = memory_format_of(input, weight);
  const bool empty = grad_output.numel() == 0 || input.numel() == 0;
  const bool wanted = mask[0] || mask[1] || mask[2];
  Conv2dShape shape{};
  std::array<Tensor, 2> native;
  if (!empty && wanted) {
    check_has_storage(grad_output, "conv2d_backward: grad_output");
    if (mask[1]) check_has_storage(input, "conv2d_backward: input");
    if (mask[0]) check_has_storage(weight, "conv2d_backward: weight");
    check_has_storage(addend, "conv2d_backward: addend");
    shape = shape_of(input, weight, sizes, v, format);
    if (input.is_cpu()) native = conv2d_backward_onednn(shape, grad_output, input, weight, mask);
  }
  mask[0] &= !native[0].defined();
  mask[1] &= !native[1].defined();
  auto make = [&](bool wanted, IntArrayRef shape, at::TensorOptions options) {
    if (!wanted) return Tensor();
    return empty ? at::zeros(shape, options) : at::empty(shape, options);
  };
  const auto type = float32_parameters ? at::kFloat : input.scalar_type();
  const auto options = input.options(), of_parameters = options.dtype(type);
  Tensor grad_input = make(mask[0], input.sizes(), options.memory_format(format));
  ParameterGradients parameters{make(mask[1], weight.sizes(), of_parameters.memory_format(format)),
                                make(mask[2], weight.sizes().slice(0, 1), of_parameters)};
  bool is_added = false;
  if (!empty && (mask[0] || mask[1] || mask[2])) {
    const Tensor dy = in_format(grad_output, format);
    const Tensor x = mask[1] ? in_format(input, format) : Tensor();
    const Tensor w = mask[0] ? in_format(weight, format) : Tensor();
    auto in = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    // dgrad's kernel reads the addend in its present layout, or a second kernel adds it.
    const bool joins = mask[0] && addend.defined() && addend.is_contiguous(format);
    Conv2dBackwardParams p{.shape = shape,
                           .grad_output = dy.const_data_ptr(),
                           .input = in(x),
                           .weight = in(w),
                           .grad_input = mask[0] ? grad_input.mutable_data_ptr() : nullptr,
                           .grad_weight = nullptr,
                           .grad_bias = nullptr,
                           .addend = joins ? addend.const_data_ptr() : nullptr};
    parameters.set_arguments(p);
    is_added = run(p, parameters);
  }
  if (native[0].defined()) grad_input = native[0];
  if (native[1].defined()) parameters.weight = native[1];
  if (addend.defined() && !is_added) grad_input.add_(addend);
  if (grad_input.defined() && input_.dim() == 3) grad_input = grad_input.squeeze(0);
  parameters = parameters.in_type(type);
  return {grad_input, parameters.weight, parameters.bias};
}

Tensor conv2d_cpu_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         int64_t groups) {
  return conv2d_with(input, weight, bias, stride, padding, dilation, groups, conv2d_cpu);
}
Tensors3 conv2d_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                    IntArrayRef dilation, int64_t groups, Conv2dMask mask,
                                    const OptionalTensor& addend, bool float32_parameters) {
  const auto run = [&](Conv2dBackwardParams p, ParameterGradients& parameters) {
    if (float32_parameters) {
      parameters = parameters.empty_in_type(input.scalar_type());
      parameters.set_arguments(p);
    }
    conv2d_backward_cpu(p);
    return false;
  };
  return conv2d_backward_with(grad_output, input, weight, stride, padding, dilation, groups, mask,
                              addend, float32_parameters, run);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor conv2d_cuda_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          int64_t groups) {
  const CudaCall call(input);
  return conv2d_with(input, weight, bias, stride, padding, dilation, groups, [&](Conv2dParams p) {
    p.shape.allow_tf32 = allow_tf32();
    p.shape.sm90 = sm90_path_available();
    const Conv2dFpropPlan plan = choose_conv2d(p, current_device_info());
    const Workspace workspace(plan.workspace_bytes, input);
    launch_conv2d(p, plan, workspace.data(), call.stream);
  });
}

Tensors3 conv2d_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                     const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                     IntArrayRef dilation, int64_t groups, Conv2dMask mask,
                                     const OptionalTensor& addend, bool float32_parameters) {
  const CudaCall call(input);
  const auto run = [&](Conv2dBackwardParams p, ParameterGradients& parameters) {
    p.shape.allow_tf32 = allow_tf32();
    p.shape.sm90 = sm90_path_available();
    Conv2dBackwardPlan plan = choose_conv2d_backward(p, current_device_info());
    if (p.float32_parameters && !writes_float32(plan)) {
      parameters = parameters.empty_in_type(input.scalar_type());
      parameters.set_arguments(p);
      plan = choose_conv2d_backward(p, current_device_info());
    }
    const Workspace workspace(plan.workspace_bytes(), input);
    launch_conv2d_backward(p, plan, workspace.data(), call.stream);
    return plan.input && adds(*plan.input);
  };
  return conv2d_backward_with(grad_output, input, weight, stride, padding, dilation, groups, mask,
                              addend, float32_parameters, run);
}
#endif

// ---- Meta ----

Tensor conv2d_meta(const Tensor& input_, const Tensor& weight, const OptionalTensor& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   SymInt groups) {
  check_types(input_, weight, bias);
  if (!is_ours(input_)) {
    return at::conv2d_symint(input_, weight, bias, stride, padding, dilation, groups);
  }
  const Tensor input = batched(input_);
  const auto v = expand_windows<SymInt>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<SymInt>(input, weight, bias, v, sym_sizes);
  Tensor output =
      at::empty_symint(sizes, input.options().memory_format(memory_format_of(input, weight)));
  return input_.dim() == 3 ? output.squeeze(0) : output;
}

Tensors3 conv2d_backward_meta(const Tensor& grad_output_, const Tensor& input_,
                              const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
                              SymIntArrayRef dilation, SymInt groups, Conv2dMask mask,
                              const OptionalTensor& addend, bool float32_parameters) {
  check_types(input_, weight, std::nullopt);
  check_addend(value_or_undefined(addend), input_, mask);
  const Tensor input = batched(input_);
  const auto v = expand_windows<SymInt>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<SymInt>(input, weight, std::nullopt, v, sym_sizes);
  check_conv2d_backward<SymInt>(batched(grad_output_), input, sizes, float32_parameters, sym_sizes);
  const auto format = memory_format_of(input, weight);
  const auto options = input.options();
  const auto of_parameters = float32_parameters ? options.dtype(at::kFloat) : options;
  Tensors3 gradients;
  if (mask[0]) {
    const Tensor grad_input = at::empty_symint(input.sym_sizes(), options.memory_format(format));
    std::get<0>(gradients) = input_.dim() == 3 ? grad_input.squeeze(0) : grad_input;
  }
  if (mask[1]) {
    std::get<1>(gradients) =
        at::empty_symint(weight.sym_sizes(), of_parameters.memory_format(format));
  }
  if (mask[2]) std::get<2>(gradients) = at::empty_symint({weight.sym_size(0)}, of_parameters);
  return gradients;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[2] stride, "
      "SymInt[2] padding, SymInt[2] dilation, SymInt groups, bool[3] output_mask, "
      "Tensor? addend=None, bool float32_parameters=False) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv2d", conv2d_cpu_kernel);
  m.impl("conv2d_backward", conv2d_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv2d", conv2d_cuda_kernel);
  m.impl("conv2d_backward", conv2d_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv2d", conv2d_meta);
  m.impl("conv2d_backward", conv2d_backward_meta);
}

}  // namespace warpwright
