// Autograd and Autocast of conv2d and conv_transpose2d: both are bilinear in input and weight, and
// add a bias. Derivatives of such an op, and of its gradients, are calls of the op and of its
// backward.
//
// An op describes itself by a struct
//   struct Conv2dOp {
//     static constexpr const char* kSecondNode = "WarpwrightConv2dBackwardBackward";
//     using Node = Conv2dBackward;        // of the forward; its Attributes are the geometry
//     static Tensor forward(input, weight, bias, geometry);
//     static Tensors3 backward(grad_output, input, weight, geometry, mask, addend...);
//   };
// `addend`, which a backward may have, is a tensor that it adds to the input's gradient.
#pragma once

#include <tuple>

#include "ops/conv2d/torch/autocast.h"
#include "ops/conv2d/torch/common.h"

namespace warpwright {

// A number per channel as a tensor like the output.
inline Tensor expanded_bias(const Tensor& bias, const Tensor& like) {
  return bias.view({-1, 1, 1}).expand_symint(like.sym_sizes()).contiguous();
}

// ---- Autograd ----

template <class Op>
using GeometryOf = typename Op::Node::Attributes;

template <class Op>
Tensor bilinear_input_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                               const GeometryOf<Op>& geometry) {
  return std::get<0>(
      Op::backward(grad_output, input, weight, geometry, Conv2dMask{true, false, false}));
}

template <class Op>
Tensor bilinear_weight_gradient(const Tensor& grad_output, const Tensor& input,
                                const Tensor& weight, const GeometryOf<Op>& geometry) {
  return std::get<1>(
      Op::backward(grad_output, input, weight, geometry, Conv2dMask{false, true, false}));
}

// forward(input_1, weight) + forward(input, weight_1) + bias_1. Each of the three directions may be
// undefined. The first call adds the bias.
template <class Op>
Tensor bilinear_derivative(const Tensor& input, const Tensor& weight, const Tensor& input_1,
                           const Tensor& weight_1, Tensor bias_1, const Tensor& like,
                           const GeometryOf<Op>& geometry) {
  Tensor result;
  if (input_1.defined()) {
    result = Op::forward(input_1, weight, bias_1, geometry);
    bias_1 = Tensor();
  }
  if (weight_1.defined()) {
    result = sum_of(result, Op::forward(input, weight_1, bias_1, geometry));
    bias_1 = Tensor();
  }
  return bias_1.defined() ? expanded_bias(bias_1, like) : result;
}

// saved: grad_output, input, weight; grads: of grad_input, grad_weight, grad_bias. A fourth input
// is the addend.
template <class Op>
struct BilinearBackwardBackward {
  static constexpr const char* kName = Op::kSecondNode;
  using Attributes = GeometryOf<Op>;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    // By a gradient in float32: float32.
    auto narrowed = [&](const Tensor& grad) {
      return grad.defined() ? grad.to(grad_output.scalar_type()) : grad;
    };
    const Tensor gg_input = grads[0], gg_weight = narrowed(grads[1]), gg_bias = narrowed(grads[2]);
    variable_list results(needs.size());
    if (needs[0]) {
      results[0] = bilinear_derivative<Op>(input, weight, gg_input, gg_weight, gg_bias, grad_output,
                                           geometry);
    }
    if (needs[1] && gg_weight.defined()) {
      results[1] = bilinear_input_gradient<Op>(grad_output, input, gg_weight, geometry);
    }
    if (needs[2] && gg_input.defined()) {
      results[2] = bilinear_weight_gradient<Op>(grad_output, gg_input, weight, geometry);
    }
    if (needs.size() > 3) results[3] = gg_input;
    return results;
  }
};

// The op and its node. The node leads to `weight_source` and `bias_source`: weight and bias
// themselves, or under autocast their float32 sources.
template <class Op>
Tensor differentiable_bilinear(const Tensor& input, const Tensor& weight, const Tensor& bias,
                               const GeometryOf<Op>& geometry, const Tensor& weight_source,
                               const Tensor& bias_source) {
  auto node = make_node<typename Op::Node>(geometry, input, weight_source, bias_source);
  Tensor output = below_autograd([&] { return Op::forward(input, weight, bias, geometry); });
  if (node) {
    node->save(input);
    node->save(weight);
    set_history(output, node);
  }
  return output;
}

template <class Op>
Tensor bilinear_autograd(const Tensor& input, const Tensor& weight, const Tensor& bias,
                         const GeometryOf<Op>& geometry) {
  Tensor output = differentiable_bilinear<Op>(input, weight, bias, geometry, weight, bias);
  if (any_tangent(input, weight, bias)) {
    auto direction = [](const Tensor& t) { return has_tangent(t) ? tangent(t) : Tensor(); };
    const Tensor result =
        bilinear_derivative<Op>(primal(input), primal(weight), direction(input), direction(weight),
                                direction(bias), output, geometry);
    set_tangent(output, tangent_with_zero_terms(result, input, weight));
  }
  return output;
}

template <class Op, class... Addend>
Tensors3 bilinear_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& weight, const GeometryOf<Op>& geometry,
                                    Conv2dMask mask, const Addend&... addend) {
  auto node =
      make_node<BilinearBackwardBackward<Op>>(geometry, grad_output, input, weight, addend...);
  Tensors3 gradients = below_autograd(
      [&] { return Op::backward(grad_output, input, weight, geometry, mask, addend...); });
  auto& [grad_input, grad_weight, grad_bias] = gradients;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight);
    set_history(variable_list{grad_input, grad_weight, grad_bias}, node);
  }
  if (any_tangent(grad_output, input, weight, addend...)) {
    const Tensor dy = primal(grad_output), x = primal(input), w = primal(weight);
    Tensor t_input, t_weight, t_bias;
    if (has_tangent(grad_output)) {
      std::tie(t_input, t_weight, t_bias) =
          Op::backward(tangent(grad_output), x, w, geometry, mask);
    }
    if (mask[0] && has_tangent(weight)) {
      t_input = sum_of(t_input, bilinear_input_gradient<Op>(dy, x, tangent(weight), geometry));
    }
    if (mask[1] && has_tangent(input)) {
      t_weight = sum_of(t_weight, bilinear_weight_gradient<Op>(dy, tangent(input), w, geometry));
    }
    ((t_input = has_tangent(addend) ? sum_of(t_input, tangent(addend)) : t_input), ...);
    if (t_input.defined()) set_tangent(grad_input, t_input);
    if (t_weight.defined()) set_tangent(grad_weight, t_weight);
    if (t_bias.defined()) set_tangent(grad_bias, t_bias);
  }
  return gradients;
}

// ---- Autocast ----

template <class Op>
Tensor bilinear_autocast(at::DeviceType device, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& optional_bias, GeometryOf<Op> geometry) {
  const Tensor bias = value_or_undefined(optional_bias);
  const ConvOperands cast(device, input, weight, bias);
  if constexpr (requires { geometry.float32_parameters; }) {
    if (cast.direct) {
      geometry.float32_parameters = true;
      return differentiable_bilinear<Op>(cast.input, cast.weight, cast.bias, geometry, weight,
                                         bias);
    }
  }
  return Op::forward(cast.input, cast.weight, cast.bias, geometry);
}

}  // namespace warpwright
