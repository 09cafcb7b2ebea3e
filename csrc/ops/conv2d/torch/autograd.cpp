// conv2d above its kernels: Autograd of both ops, padding given as a word, Autocast.
#include <ATen/autocast_mode.h>
#include <ATen/ops/conv2d.h>

#include <tuple>

#include "ops/conv2d/torch/common.h"
#include "torch/skip.h"
#include "torch/weight_copies.h"

namespace warpwright {
namespace {

// ---- Autograd ----

// saved: input, weight.
struct Conv2dBackward {
  static constexpr const char* kName = kConv2dNode.name;
  using Attributes = Conv2dGeometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_weight, grad_bias] =
        call::joined_gradients(grads[0], kConv2dNode.gradient(grads), saved[0], saved[1], geometry,
                               {needs[0], needs[1], needs[2]});
    return {grad_input, grad_weight, grad_bias};
  }
};

// Each gradient is bilinear, so its derivatives are convolutions again. saved: grad_output, input,
// weight; grads: of grad_input, grad_weight, grad_bias. The fourth input is the addend.
struct Conv2dBackwardBackward {
  static constexpr const char* kName = "WarpwrightConv2dBackwardBackward";
  using Attributes = Conv2dGeometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    const Tensor &gg_input = grads[0], &gg_weight = grads[1], &gg_bias = grads[2];
    Tensor d_grad_output, d_input, d_weight;
    if (needs[0]) {
      Tensor bias = gg_bias;  // added by the first convolution
      if (gg_input.defined()) {
        d_grad_output = call::conv2d(gg_input, weight, bias, geometry);
        bias = Tensor();
      }
      if (gg_weight.defined()) {
        d_grad_output = sum_of(d_grad_output, call::conv2d(input, gg_weight, bias, geometry));
        bias = Tensor();
      }
      if (bias.defined()) {
        d_grad_output = bias.view({-1, 1, 1}).expand_symint(grad_output.sym_sizes()).contiguous();
      }
    }
    if (needs[1] && gg_weight.defined()) {
      d_input = call::input_gradient(grad_output, input, gg_weight, geometry);
    }
    if (needs[2] && gg_input.defined()) {
      d_weight = call::weight_gradient(grad_output, gg_input, weight, geometry);
    }
    return {d_grad_output, d_input, d_weight, gg_input};
  }
};

Conv2dGeometry geometry_of(SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                           SymInt groups) {
  return {stride.vec(), padding.vec(), dilation.vec(), std::move(groups)};
}

Tensor conv2d_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  if (!is_ours(input) && padding.size() <= 2) {
    return at::conv2d_symint(input, weight, bias_, stride, padding, dilation, groups);
  }
  const Tensor bias = value_or_undefined(bias_);
  const Conv2dGeometry geometry = geometry_of(stride, padding, dilation, groups);
  auto node = make_node<Conv2dBackward>(geometry, input, weight, bias);
  Tensor output = below_autograd([&] { return call::conv2d(input, weight, bias, geometry); });
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
      result = call::conv2d(tangent(input), w, b, geometry);
      b = Tensor();
    }
    if (has_tangent(weight)) {
      result = sum_of(result, call::conv2d(x, tangent(weight), b, geometry));
      b = Tensor();
    }
    if (b.defined()) result = b.view({-1, 1, 1}).expand_symint(output.sym_sizes()).contiguous();
    set_tangent(output, tangent_with_zero_terms(result, input, weight));
  }
  return output;
}

Tensors3 conv2d_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                  const Tensor& weight, SymIntArrayRef stride,
                                  SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                                  Conv2dMask mask, const OptionalTensor& addend_) {
  const Conv2dGeometry geometry = geometry_of(stride, padding, dilation, groups);
  const Tensor addend = value_or_undefined(addend_);
  auto node = make_node<Conv2dBackwardBackward>(geometry, grad_output, input, weight, addend);
  Tensors3 gradients = below_autograd(
      [&] { return call::conv2d_backward(grad_output, input, weight, geometry, mask, addend); });
  auto& [grad_input, grad_weight, grad_bias] = gradients;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight);
    set_history(variable_list{grad_input, grad_weight, grad_bias}, node);
  }
  if (any_tangent(grad_output, input, weight, addend)) {
    const Tensor dy = primal(grad_output), x = primal(input), w = primal(weight);
    Tensor t_input, t_weight, t_bias;
    if (has_tangent(grad_output)) {
      std::tie(t_input, t_weight, t_bias) =
          call::conv2d_backward(tangent(grad_output), x, w, geometry, mask);
    }
    if (mask[0] && has_tangent(weight)) {
      t_input = sum_of(t_input, call::input_gradient(dy, x, tangent(weight), geometry));
    }
    if (mask[1] && has_tangent(input)) {
      t_weight = sum_of(t_weight, call::weight_gradient(dy, tangent(input), w, geometry));
    }
    if (has_tangent(addend)) t_input = sum_of(t_input, tangent(addend));
    if (t_input.defined()) set_tangent(grad_input, t_input);
    if (t_weight.defined()) set_tangent(grad_weight, t_weight);
    if (t_bias.defined()) set_tangent(grad_bias, t_bias);
  }
  return gradients;
}

// ---- padding='same' or 'valid' ----

// A composite op, so that the other kernels see only numbers.
Tensor conv2d_padding(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      SymIntArrayRef stride, std::string_view padding, SymIntArrayRef dilation,
                      SymInt groups) {
  if (!is_ours(input) && weight.scalar_type() == input.scalar_type()) {
    return at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
  }
  Conv2dGeometry g = geometry_of(stride, SymInt(0), dilation, groups);
  if (padding == "same") {
    TORCH_CHECK(input.dim() == 3 || input.dim() == 4,
                "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: ",
                input.sym_sizes());
    TORCH_CHECK(weight.dim() == 4, "Expected ", weight.dim(), "-dimensional input for ",
                weight.dim(), "-dimensional weight", weight.sym_sizes(), ", but got 4-dimensional ",
                "input of size ", input.sym_sizes(), " instead");
    const auto v = expand_windows<SymInt>(stride, g.padding, dilation, groups);
    TORCH_CHECK(v.stride[0] == 1 && v.stride[1] == 1,
                "padding='same' is not supported for strided convolutions");
    g.padding.clear();
    std::vector<SymInt> after;
    for (int i = 0; i < 2; ++i) {
      const SymInt total = checked_mul(v.dilation[i], weight.sym_size(i + 2) - 1);
      g.padding.push_back(total / 2);
      after.push_back(total - total / 2);
    }
    g.padding.insert(g.padding.end(), after.begin(), after.end());
  } else {
    TORCH_CHECK(padding == "valid", "Invalid padding string: '", padding, "'");
  }
  return call::conv2d(input, weight, value_or_undefined(bias), g);
}

// ---- Autocast: ATen's lower_precision_fp list ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
Tensor conv2d_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  return call::conv2d(at::autocast::cached_cast(type, input, kDevice),
                      cast_weight(type, weight, kDevice),
                      cast_weight(type, value_or_undefined(bias), kDevice),
                      geometry_of(stride, padding, dilation, std::move(groups)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d_padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "str padding=\"valid\", SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.impl("conv2d_padding", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(conv2d_padding));
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv2d", conv2d_autograd);
  m.impl("conv2d_backward", conv2d_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv2d", TORCH_FN((conv2d_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>)));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv2d", TORCH_FN((conv2d_autocast<at::kCUDA, c10::DispatchKey::Autocast>)));
}

}  // namespace warpwright
