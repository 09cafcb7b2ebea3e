// Autograd of the ops of ops.cpp. The forward computes its gradients and the node keeps them. The
// final backward scales them by the incoming gradient. A backward that is differentiated again, or
// that needs the derivative of lse, recomputes them.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include "ops/linear_cross_entropy/torch/common.h"

namespace warpwright {

using namespace linear_cross_entropy;

namespace {

// ---- the ops through the dispatcher ----

namespace call {

Results linear_cross_entropy_forward(const Call& c, ScalarType dtype, Mask3 output_mask,
                                     bool return_lse, bool return_argmax) {
  static const auto op =
      find_op<Results(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                      const OptionalTensor&, int64_t, SymInt, double, int64_t, ScalarType, Mask3,
                      double, double, bool, bool)>("warpwright::linear_cross_entropy_forward");
  return op.call(c.input, c.weight, optional_if_defined(c.bias), c.target,
                 optional_if_defined(c.class_weight), c.loss.reduction, c.loss.ignore_index,
                 c.loss.label_smoothing, c.chunk_rows, dtype, output_mask, c.loss.z_loss, c.softcap,
                 return_lse, return_argmax);
}

Gradients linear_cross_entropy_backward(const Tensor& grad_output, const Tensor& grad_lse,
                                        const Call& c, Mask3 output_mask) {
  static const auto op =
      find_op<Gradients(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                        const Tensor&, const OptionalTensor&, int64_t, SymInt, double, int64_t,
                        Mask3, double, double, const OptionalTensor&)>(
          "warpwright::linear_cross_entropy_backward");
  return op.call(grad_output, c.input, c.weight, optional_if_defined(c.bias), c.target,
                 optional_if_defined(c.class_weight), c.loss.reduction, c.loss.ignore_index,
                 c.loss.label_smoothing, c.chunk_rows, output_mask, c.loss.z_loss, c.softcap,
                 optional_if_defined(grad_lse));
}

// gradient *= factor, on the device. Writes nothing if the factor is 1.
void cross_entropy_scale_(const Tensor& gradient, const Tensor& factor) {
  static const auto op =
      find_op<void(const Tensor&, const Tensor&)>("warpwright::cross_entropy_scale_");
  op.call(gradient, factor);
}

}  // namespace call

Tensor logits_of(const Call& c) {
  return linear_ops::linear(c.input, c.weight, optional_if_defined(c.bias));
}

// ---- the factor ----

// The forward's gradient times `factor`. In place if no other reference exists and no second
// backward pass will need it.
Tensor scaled(const Tensor& gradient, const Tensor& factor, ScalarType dtype) {
  // Traced or batched: a plain product, which a compiler can fuse.
  if (at::areAnyTensorSubclassLike({gradient, factor})) {
    return (gradient.to(factor.scalar_type()) * factor).to(dtype);
  }
  constexpr size_t kNodeAndCaller = 2;  // SavedVariable, and the list that it was unpacked to
  const bool ours_alone = !torch::autograd::get_current_graph_task_keep_graph() &&
                          gradient.use_count() <= kNodeAndCaller &&
                          gradient.storage().use_count() == 1;
  const Tensor result = ours_alone ? gradient : gradient.clone();
  call::cross_entropy_scale_(result, factor);
  return result.to(dtype);
}

// ---- Autograd ----

struct LinearCrossEntropyBackward {
  static constexpr const char* kName = "WarpwrightLinearCrossEntropyBackward";
  using Attributes = Options;
  // saved: input, weight, bias, target, class_weight, total_weight, and the forward's gradients;
  // grads: by loss and by lse
  static variable_list backward(const Attributes& options, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Call c(saved[0], saved[1], saved[2], saved[3], saved[4], options);
    const Tensor& grad_lse = grads[1];
    Tensor grad_output = grads[0];
    // A backward that is differentiated needs the gradients as functions of their inputs.
    const bool again = c.is_none() || grad_lse.defined() || at::GradMode::is_enabled() ||
                       any_tangent(grad_output, c.input, c.weight, c.bias);
    if (again) {
      if (!grad_output.defined()) {
        const SymInt rows[] = {c.input.sym_size(0)};
        grad_output =
            at::zeros_symint(c10::SymIntArrayRef(rows, c.is_none() ? 1 : 0), grad_lse.options());
      }
      const auto [dx, dw, db] = call::linear_cross_entropy_backward(grad_output, grad_lse, c,
                                                                    {needs[0], needs[1], needs[2]});
      return {dx, dw, db};
    }
    const ScalarType type = c.input.scalar_type();
    Tensor factor = grad_output.to(accum_type(type));
    if (divides_late(c)) factor = factor / saved[5].masked_fill(saved[5].eq(0), 1);
    variable_list result(3);
    for (size_t i = 0; i < 3; ++i) {
      if (needs[i]) result[i] = scaled(saved[6 + i], factor, type);
    }
    return result;
  }
};

Results linear_cross_entropy_forward_autograd(const Tensor& input, const Tensor& weight,
                                              const OptionalTensor& bias, const Tensor& target,
                                              const OptionalTensor& class_weight, int64_t reduction,
                                              SymInt ignore_index, double label_smoothing,
                                              int64_t chunk_rows, ScalarType dtype,
                                              Mask3 output_mask, double z_loss, double softcap,
                                              bool return_lse, bool return_argmax) {
  const Call c(
      input, weight, bias, target, class_weight,
      {{reduction, std::move(ignore_index), label_smoothing, z_loss}, softcap, chunk_rows});
  check_constant(c.class_weight, "linear_cross_entropy_forward", "class_weight");
  check_constant(c.target, "linear_cross_entropy_forward", "target");
  auto node = make_node<LinearCrossEntropyBackward>(c, c.input, c.weight, c.bias);
  if (node && !c.is_none()) {
    auto wants = [](const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
    output_mask = {output_mask[0] || wants(c.input), output_mask[1] || wants(c.weight),
                   output_mask[2] || wants(c.bias)};
  }
  Results results = below_autograd([&] {
    return call::linear_cross_entropy_forward(c, dtype, output_mask, return_lse, return_argmax);
  });
  const auto& [loss, total_weight, dx, dw, db, lse, argmax] = results;
  if (node) {
    for (const Tensor* tensor :
         {&c.input, &c.weight, &c.bias, &c.target, &c.class_weight, &total_weight, &dx, &dw, &db}) {
      node->save(*tensor);
    }
    set_history(loss, node);
    set_history(lse, node);
  }
  if (any_tangent(c.input, c.weight, c.bias)) {
    const Capped z(c, logits_of(c), c.target);
    const ScalarType type = c.softcap == 0 ? dtype : z.logits.scalar_type();
    const auto [apart, row_stats, total] = loss_of(c, z, reduction, type);
    set_tangent(loss, tangent(apart).to(dtype));
    if (lse.defined()) set_tangent(lse, tangent(lse_of(z, row_stats)));
  }
  return results;
}

// To be differentiated: the gradients by separate ops, which keep all logits.
Gradients differentiable_backward(const Tensor& grad_output, const Tensor& grad_lse, const Call& c,
                                  Mask3 mask) {
  check_plain_storage(grad_output, "linear_cross_entropy_backward: grad_output");
  check_plain_storage(grad_lse, "linear_cross_entropy_backward: grad_lse");
  const Capped z(c, logits_of(c), c.target);
  Capped constant = z;
  constant.logits = z.logits.detach();
  const Tensor grad = c.softcap == 0 ? grad_output : grad_output.to(z.logits.scalar_type());
  const auto [loss, row_stats, total_weight] =
      loss_of(c, constant, c.loss.reduction, grad.scalar_type());
  Tensor dz = z.gradient(loss_gradient(c, grad, z, row_stats, total_weight, c.loss.reduction));
  if (grad_lse.defined()) dz = dz + lse_gradient(z, grad_lse);
  return linear_ops::linear_backward(dz.to(c.input.scalar_type()), c.input, c.weight, mask);
}

Gradients linear_cross_entropy_backward_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& bias, const Tensor& target, const OptionalTensor& class_weight,
    int64_t reduction, SymInt ignore_index, double label_smoothing, int64_t chunk_rows,
    Mask3 output_mask, double z_loss, double softcap, const OptionalTensor& grad_lse) {
  const Call c(
      input, weight, bias, target, class_weight,
      {{reduction, std::move(ignore_index), label_smoothing, z_loss}, softcap, chunk_rows});
  check_constant(c.class_weight, "linear_cross_entropy_backward", "class_weight");
  check_constant(c.target, "linear_cross_entropy_backward", "target");
  const Tensor by_lse = value_or_undefined(grad_lse);
  for (const Tensor* tensor : {&grad_output, &by_lse, &c.input, &c.weight, &c.bias}) {
    if (is_differentiated(*tensor)) {
      return differentiable_backward(grad_output, by_lse, c, output_mask);
    }
  }
  return below_autograd(
      [&] { return call::linear_cross_entropy_backward(grad_output, by_lse, c, output_mask); });
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_autograd);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_autograd);
}

}  // namespace warpwright
