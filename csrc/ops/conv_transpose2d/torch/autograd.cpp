// conv_transpose2d above its kernels: Autograd of both ops, Autocast.
#include <ATen/autocast_mode.h>
#include <ATen/ops/conv_transpose2d.h>

#include <tuple>

#include "ops/conv_transpose2d/torch/common.h"
#include "torch/weight_copies.h"

namespace warpwright {
namespace {

// ---- Autograd ----

Tensor transposed_input_gradient(const Tensor& grad_output, const Tensor& input,
                                 const Tensor& weight, const ConvTranspose2dGeometry& g) {
  return std::get<0>(
      call::conv_transpose2d_backward(grad_output, input, weight, g, {true, false, false}));
}

Tensor transposed_weight_gradient(const Tensor& grad_output, const Tensor& input,
                                  const Tensor& weight, const ConvTranspose2dGeometry& g) {
  return std::get<1>(
      call::conv_transpose2d_backward(grad_output, input, weight, g, {false, true, false}));
}

// A vector per channel as a tensor like the output.
Tensor expanded_bias(const Tensor& bias, const Tensor& like) {
  return bias.view({-1, 1, 1}).expand_symint(like.sym_sizes()).contiguous();
}

// saved: input, weight.
struct ConvTranspose2dBackward {
  static constexpr const char* kName = "WarpwrightConvTranspose2dBackward";
  using Attributes = ConvTranspose2dGeometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_weight, grad_bias] = call::conv_transpose2d_backward(
        grads[0], saved[0], saved[1], geometry, {needs[0], needs[1], needs[2]});
    return {grad_input, grad_weight, grad_bias};
  }
};

// Each gradient is bilinear, so its derivatives are such ops again. saved: grad_output, input,
// weight; grads: of grad_input, grad_weight, grad_bias.
struct ConvTranspose2dBackwardBackward {
  static constexpr const char* kName = "WarpwrightConvTranspose2dBackwardBackward";
  using Attributes = ConvTranspose2dGeometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    const Tensor &gg_input = grads[0], &gg_weight = grads[1], &gg_bias = grads[2];
    Tensor d_grad_output, d_input, d_weight;
    if (needs[0]) {
      Tensor bias = gg_bias;  // added by the first of the ops
      if (gg_input.defined()) {
        d_grad_output = call::conv_transpose2d(gg_input, weight, bias, geometry);
        bias = Tensor();
      }
      if (gg_weight.defined()) {
        d_grad_output =
            sum_of(d_grad_output, call::conv_transpose2d(input, gg_weight, bias, geometry));
        bias = Tensor();
      }
      if (bias.defined()) d_grad_output = expanded_bias(bias, grad_output);
    }
    if (needs[1] && gg_weight.defined()) {
      d_input = transposed_input_gradient(grad_output, input, gg_weight, geometry);
    }
    if (needs[2] && gg_input.defined()) {
      d_weight = transposed_weight_gradient(grad_output, gg_input, weight, geometry);
    }
    return {d_grad_output, d_input, d_weight};
  }
};

Tensor conv_transpose2d_autograd(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias_, SymIntArrayRef stride,
                                 SymIntArrayRef padding, SymIntArrayRef output_padding,
                                 SymInt groups, SymIntArrayRef dilation) {
  if (!is_ours(input)) {
    return at::conv_transpose2d_symint(input, weight, bias_, stride, padding, output_padding,
                                       groups, dilation);
  }
  const Tensor bias = value_or_undefined(bias_);
  const ConvTranspose2dGeometry geometry =
      transposed_geometry(stride, padding, output_padding, groups, dilation);
  auto node = make_node<ConvTranspose2dBackward>(geometry, input, weight, bias);
  Tensor output =
      below_autograd([&] { return call::conv_transpose2d(input, weight, bias, geometry); });
  if (node) {
    node->save(input);
    node->save(weight);
    set_history(output, node);
  }
  if (any_tangent(input, weight, bias)) {
    const Tensor x = primal(input), w = primal(weight);
    Tensor b = has_tangent(bias) ? tangent(bias) : Tensor();
    Tensor result;
    if (has_tangent(input)) {
      result = call::conv_transpose2d(tangent(input), w, b, geometry);
      b = Tensor();
    }
    if (has_tangent(weight)) {
      result = sum_of(result, call::conv_transpose2d(x, tangent(weight), b, geometry));
      b = Tensor();
    }
    if (b.defined()) result = expanded_bias(b, output);
    set_tangent(output, tangent_with_zero_terms(result, input, weight));
  }
  return output;
}

Tensors3 conv_transpose2d_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                            const Tensor& weight, SymIntArrayRef stride,
                                            SymIntArrayRef padding, SymIntArrayRef output_padding,
                                            SymInt groups, SymIntArrayRef dilation,
                                            Conv2dMask mask) {
  const ConvTranspose2dGeometry geometry =
      transposed_geometry(stride, padding, output_padding, groups, dilation);
  auto node = make_node<ConvTranspose2dBackwardBackward>(geometry, grad_output, input, weight);
  Tensors3 gradients = below_autograd(
      [&] { return call::conv_transpose2d_backward(grad_output, input, weight, geometry, mask); });
  auto& [grad_input, grad_weight, grad_bias] = gradients;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight);
    set_history(variable_list{grad_input, grad_weight, grad_bias}, node);
  }
  if (any_tangent(grad_output, input, weight)) {
    const Tensor dy = primal(grad_output), x = primal(input), w = primal(weight);
    Tensor t_input, t_weight, t_bias;
    if (has_tangent(grad_output)) {
      std::tie(t_input, t_weight, t_bias) =
          call::conv_transpose2d_backward(tangent(grad_output), x, w, geometry, mask);
    }
    if (mask[0] && has_tangent(weight)) {
      t_input = sum_of(t_input, transposed_input_gradient(dy, x, tangent(weight), geometry));
    }
    if (mask[1] && has_tangent(input)) {
      t_weight = sum_of(t_weight, transposed_weight_gradient(dy, tangent(input), w, geometry));
    }
    if (t_input.defined()) set_tangent(grad_input, t_input);
    if (t_weight.defined()) set_tangent(grad_weight, t_weight);
    if (t_bias.defined()) set_tangent(grad_bias, t_bias);
  }
  return gradients;
}

// ---- Autocast: ATen's lower_precision_fp list ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
Tensor conv_transpose2d_autocast(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, SymIntArrayRef stride,
                                 SymIntArrayRef padding, SymIntArrayRef output_padding,
                                 SymInt groups, SymIntArrayRef dilation) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  return call::conv_transpose2d(
      at::autocast::cached_cast(type, input, kDevice), cast_weight(type, weight, kDevice),
      cast_weight(type, value_or_undefined(bias), kDevice),
      transposed_geometry(stride, padding, output_padding, std::move(groups), dilation));
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv_transpose2d", conv_transpose2d_autograd);
  m.impl("conv_transpose2d_backward", conv_transpose2d_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv_transpose2d",
         TORCH_FN((conv_transpose2d_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>)));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv_transpose2d",
         TORCH_FN((conv_transpose2d_autocast<at::kCUDA, c10::DispatchKey::Autocast>)));
}

}  // namespace warpwright
