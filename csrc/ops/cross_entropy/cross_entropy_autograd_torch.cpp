// Autograd of the ops of cross_entropy_torch.cpp: first and second order by the fused ops, higher
// orders by the differentiable form in cross_entropy_call_torch.cpp.
#include <ATen/TensorOperators.h>

#include <array>
#include <tuple>

#include "ops/cross_entropy/cross_entropy_torch.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

namespace warpwright {

// The double backward in differentiable ATen ops (cross_entropy_call_torch.cpp).
std::tuple<Tensor, Tensor, Tensor> differentiable_double_backward(
    const Tensor& v, const Tensor& u, const Tensor& grad_output, const Tensor& input,
    const Tensor& target, const Tensor& weight, const Tensor& total_weight, int64_t reduction,
    const c10::SymInt& ignore_index, double label_smoothing, std::array<bool, 3> output_mask);

namespace {

using at::ScalarType;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using Mask2 = std::array<bool, 2>;
using Mask3 = std::array<bool, 3>;
using Tensor2 = std::tuple<Tensor, Tensor>;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;

// The ops through the dispatcher.
namespace call {

Tensor3 cross_entropy_forward(const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, int64_t reduction, SymInt ignore_index,
                              double label_smoothing, ScalarType dtype) {
  static const auto op =
      find_op<Tensor3(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double,
                      ScalarType)>("warpwright::cross_entropy_forward");
  return op.call(input, target, weight, reduction, std::move(ignore_index), label_smoothing, dtype);
}

Tensor2 cross_entropy_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                               const OptionalTensor& weight, const Tensor& row_stats,
                               const Tensor& total_weight, int64_t reduction, SymInt ignore_index,
                               double label_smoothing, Mask2 output_mask) {
  static const auto op =
      find_op<Tensor2(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const Tensor&, int64_t, SymInt, double, Mask2)>(
          "warpwright::cross_entropy_backward");
  return op.call(grad_output, input, target, weight, row_stats, total_weight, reduction,
                 std::move(ignore_index), label_smoothing, output_mask);
}

Tensor3 cross_entropy_double_backward(const OptionalTensor& v, const OptionalTensor& u,
                                      const Tensor& grad_output, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const Tensor& row_stats, const Tensor& total_weight,
                                      int64_t reduction, SymInt ignore_index,
                                      double label_smoothing, Mask3 output_mask) {
  static const auto op =
      find_op<Tensor3(const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                      const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, int64_t,
                      SymInt, double, Mask3)>("warpwright::cross_entropy_double_backward");
  return op.call(v, u, grad_output, input, target, weight, row_stats, total_weight, reduction,
                 std::move(ignore_index), label_smoothing, output_mask);
}

}  // namespace call

struct LossAttributes {
  int64_t reduction;
  SymInt ignore_index;
  double label_smoothing;
};

struct CrossEntropyBackward {
  static constexpr const char* kName = "WarpwrightCrossEntropyBackward";
  using Attributes = LossAttributes;
  // saved: input, target, weight, row_stats, total_weight
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_target] = call::cross_entropy_backward(
        grads[0], saved[0], saved[1], optional_if_defined(saved[2]), saved[3], saved[4],
        a.reduction, a.ignore_index, a.label_smoothing, {needs[0], needs[1]});
    return {grad_input, grad_target};
  }
};

struct CrossEntropyBackwardBackward {
  static constexpr const char* kName = "WarpwrightCrossEntropyBackwardBackward";
  using Attributes = LossAttributes;
  // saved: grad_output, input, target, weight, row_stats, total_weight
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_grad_output, grad_input, grad_target] = call::cross_entropy_double_backward(
        optional_if_defined(grads[0]), optional_if_defined(grads[1]), saved[0], saved[1], saved[2],
        optional_if_defined(saved[3]), saved[4], saved[5], a.reduction, a.ignore_index,
        a.label_smoothing, {needs[0], needs[1], needs[2]});
    return {grad_grad_output, grad_input, grad_target};
  }
};

// Labels have neither a gradient nor a tangent.
Tensor if_probabilities(const Tensor& input, const Tensor& target) {
  return is_probabilities(input, target) ? target : Tensor();
}

OptionalTensor optional_tangent(const Tensor& tensor) {
  return has_tangent(tensor) ? OptionalTensor(tangent(tensor)) : std::nullopt;
}

Tensor3 cross_entropy_forward_autograd(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight, int64_t reduction,
                                       SymInt ignore_index, double label_smoothing,
                                       ScalarType dtype) {
  const Tensor q = if_probabilities(input, target);
  auto node = make_node<CrossEntropyBackward>({reduction, ignore_index, label_smoothing}, input, q);
  auto outputs = below_autograd([&] {
    return call::cross_entropy_forward(input, target, weight, reduction, ignore_index,
                                       label_smoothing, dtype);
  });
  auto& [loss, row_stats, total_weight] = outputs;
  if (node) {
    for (const Tensor& tensor :
         {input, target, value_or_undefined(weight), row_stats, total_weight}) {
      node->save(tensor);
    }
    set_history(loss, node);
  }
  if (any_tangent(input, q)) {
    set_tangent(loss, std::get<0>(call::cross_entropy_double_backward(
                          optional_tangent(input), optional_tangent(q), primal(loss).detach(),
                          primal(input), primal(target), weight, row_stats, total_weight, reduction,
                          ignore_index, label_smoothing, {true, false, false})));
  }
  return outputs;
}

Tensor sum_defined(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a + b;
}

Tensor2 cross_entropy_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                        const Tensor& target, const OptionalTensor& weight,
                                        const Tensor& row_stats, const Tensor& total_weight,
                                        int64_t reduction, SymInt ignore_index,
                                        double label_smoothing, Mask2 output_mask) {
  const Tensor q = if_probabilities(input, target);
  auto node = make_node<CrossEntropyBackwardBackward>({reduction, ignore_index, label_smoothing},
                                                      grad_output, input, q);
  auto run = [&](const Tensor& dloss, const Tensor& z, const Tensor& labels) {
    return call::cross_entropy_backward(dloss, z, labels, weight, row_stats, total_weight,
                                        reduction, ignore_index, label_smoothing, output_mask);
  };
  Tensor2 outputs = below_autograd([&] { return run(grad_output, input, target); });
  auto& [grad_input, grad_target] = outputs;
  if (node) {
    for (const Tensor& tensor :
         {grad_output, input, target, value_or_undefined(weight), row_stats, total_weight}) {
      node->save(tensor);
    }
    set_history(grad_input, node);
    set_history(grad_target, node);
  }
  if (any_tangent(grad_output, input, q)) {
    // Linear in grad_output; by input and probabilities the Hessian is symmetric.
    Tensor input_tangent, target_tangent;
    if (has_tangent(grad_output)) {
      std::tie(input_tangent, target_tangent) =
          run(tangent(grad_output), primal(input), primal(target));
    }
    if (any_tangent(input, q)) {
      const auto [ignored, by_input, by_target] = call::cross_entropy_double_backward(
          optional_tangent(input), optional_tangent(q), primal(grad_output), primal(input),
          primal(target), weight, row_stats, total_weight, reduction, ignore_index, label_smoothing,
          {false, output_mask[0], output_mask[1]});
      input_tangent = sum_defined(input_tangent, by_input);
      target_tangent = sum_defined(target_tangent, by_target);
    }
    if (grad_input.defined()) set_tangent(grad_input, input_tangent);
    if (grad_target.defined()) set_tangent(grad_target, target_tangent);
  }
  return outputs;
}

Tensor3 cross_entropy_double_backward_autograd(const OptionalTensor& v, const OptionalTensor& u,
                                               const Tensor& grad_output, const Tensor& input,
                                               const Tensor& target, const OptionalTensor& weight,
                                               const Tensor& row_stats, const Tensor& total_weight,
                                               int64_t reduction, SymInt ignore_index,
                                               double label_smoothing, Mask3 output_mask) {
  const Tensor v_tensor = value_or_undefined(v), u_tensor = value_or_undefined(u);
  bool differentiable = any_tangent(v_tensor, u_tensor, grad_output, input, target);
  for (const Tensor& tensor : {v_tensor, u_tensor, grad_output, input, target}) {
    differentiable |= at::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
  }
  if (differentiable) {
    return differentiable_double_backward(v_tensor, u_tensor, grad_output, input, target,
                                          value_or_undefined(weight), total_weight, reduction,
                                          ignore_index, label_smoothing, output_mask);
  }
  return below_autograd([&] {
    return call::cross_entropy_double_backward(v, u, grad_output, input, target, weight, row_stats,
                                               total_weight, reduction, ignore_index,
                                               label_smoothing, output_mask);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("cross_entropy_forward", cross_entropy_forward_autograd);
  m.impl("cross_entropy_backward", cross_entropy_backward_autograd);
  m.impl("cross_entropy_double_backward", cross_entropy_double_backward_autograd);
}

}  // namespace warpwright
