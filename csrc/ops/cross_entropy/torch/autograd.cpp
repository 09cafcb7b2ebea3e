// Autograd of the ops of cross_entropy/torch/ops.cpp: first and second order by the fused ops,
// higher orders by the differentiable form in cross_entropy/torch/call.cpp. Where it pays, the
// forward computes the gradient and the node keeps it. The final backward scales it in place and
// returns it. Any other backward recomputes the gradient from the logits.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/torch/common.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

namespace warpwright {

// The double backward in differentiable ATen ops (cross_entropy/torch/call.cpp).
std::tuple<Tensor, Tensor, Tensor> differentiable_double_backward(
    const Tensor& v, const Tensor& u, const Tensor& grad_output, const Tensor& input,
    const Tensor& target, const Tensor& weight, const Tensor& total_weight,
    const LossOptions& options, std::array<bool, 3> output_mask);

namespace {

// The ops through the dispatcher.
namespace call {

Tensor3 cross_entropy_forward(const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, const LossOptions& options,
                              ScalarType dtype) {
  static const auto op =
      find_op<Tensor3(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double,
                      ScalarType, double, bool)>("warpwright::cross_entropy_forward");
  return op.call(input, target, weight, options.reduction, options.ignore_index,
                 options.label_smoothing, dtype, options.z_loss, options.inplace_backward);
}

Tensor4 cross_entropy_forward_gradient(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight, const LossOptions& options,
                                       ScalarType dtype) {
  static const auto op =
      find_op<Tensor4(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double,
                      ScalarType, double)>("warpwright::cross_entropy_forward_gradient");
  return op.call(input, target, weight, options.reduction, options.ignore_index,
                 options.label_smoothing, dtype, options.z_loss);
}

void cross_entropy_scale_(const Tensor& gradient, const Tensor& factor) {
  static const auto op =
      find_op<void(const Tensor&, const Tensor&)>("warpwright::cross_entropy_scale_");
  op.call(gradient, factor);
}

Tensor2 cross_entropy_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                               const OptionalTensor& weight, const Tensor& row_stats,
                               const Tensor& total_weight, const LossOptions& options,
                               Mask2 output_mask) {
  static const auto op =
      find_op<Tensor2(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const Tensor&, int64_t, SymInt, double, Mask2, double)>(
          "warpwright::cross_entropy_backward");
  return op.call(grad_output, input, target, weight, row_stats, total_weight, options.reduction,
                 options.ignore_index, options.label_smoothing, output_mask, options.z_loss);
}

void cross_entropy_backward_(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                             const OptionalTensor& weight, const Tensor& row_stats,
                             const Tensor& total_weight, const LossOptions& options) {
  static const auto op =
      find_op<void(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                   const Tensor&, const Tensor&, int64_t, SymInt, double, double)>(
          "warpwright::cross_entropy_backward_");
  op.call(grad_output, input, target, weight, row_stats, total_weight, options.reduction,
          options.ignore_index, options.label_smoothing, options.z_loss);
}

Tensor cross_entropy_lse(const Tensor& input, const Tensor& row_stats) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&)>("warpwright::cross_entropy_lse");
  return op.call(input, row_stats);
}

Tensor3 cross_entropy_double_backward(const OptionalTensor& v, const OptionalTensor& u,
                                      const Tensor& grad_output, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const Tensor& row_stats, const Tensor& total_weight,
                                      const LossOptions& options, Mask3 output_mask) {
  static const auto op =
      find_op<Tensor3(const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                      const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, int64_t,
                      SymInt, double, Mask3, double)>("warpwright::cross_entropy_double_backward");
  return op.call(v, u, grad_output, input, target, weight, row_stats, total_weight,
                 options.reduction, options.ignore_index, options.label_smoothing, output_mask,
                 options.z_loss);
}

}  // namespace call

// Labels have neither a gradient nor a tangent.
Tensor if_probabilities(const Tensor& input, const Tensor& target) {
  return is_probabilities(input, target) ? target : Tensor();
}

// Arguments that the derivatives treat as constants.
void check_constants(const char* op, const OptionalTensor& weight, const Tensor& row_stats = {},
                     const Tensor& total_weight = {}) {
  check_constant(value_or_undefined(weight), op, "weight");
  check_constant(row_stats, op, "row_stats");
  check_constant(total_weight, op, "total_weight");
}

OptionalTensor optional_tangent(const Tensor& tensor) {
  return has_tangent(tensor) ? OptionalTensor(tangent(tensor)) : std::nullopt;
}

// ---- the gradient that a forward has written ----

// Whether the tensor is plain: no subclass, no transform of torch.func, no tracing. Only this call
// then changes it.
bool is_plain(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kNotPlain(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched,
       c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor});
  return (tensor.is_cpu() || tensor.is_cuda()) && !tensor.key_set().has_any(kNotPlain);
}

// Whether the forward writes the gradient with the loss. float16 does not, because its gradient
// needs the loss's scale (GradScaler) before it is rounded.
bool gradient_in_forward(const Tensor& input, const Tensor& target, const LossOptions& options) {
  if (options.inplace_backward || !input.requires_grad() ||
      options.reduction == at::Reduction::None || input.scalar_type() == at::kHalf ||
      !is_plain(input) || !is_plain(target) || any_tangent(input) ||
      is_probabilities(input, target) || input.dim() == 0) {
    return false;
  }
  if (input.is_cpu()) return true;  // the row is in the cache
  const auto rows = find_rows<int64_t>(input);
  const int64_t classes = std::max<int64_t>(1, input.size(class_dim(input)));
  return rows && rows->class_stride == 1 &&
         gradient_in_forward_pays(input.numel() / classes, classes, input.element_size());
}

// Whether this backward may return the saved gradient itself. It must be the last backward, of
// first order, and the scale must be a plain number.
bool may_consume_gradient(const Tensor& grad_output, const Tensor& input) {
  return !at::GradMode::is_enabled() && !torch::autograd::get_current_graph_task_keep_graph() &&
         is_plain(grad_output) && !any_tangent(grad_output, input);
}

// The user owns a leaf's values; the graph owns the others.
bool may_overwrite(const Tensor& input, const Tensor& target) {
  return !input.is_leaf() && is_plain(input) && !is_probabilities(input, target) &&
         is_walkable_in_place(input);
}

struct CrossEntropyBackward {
  static constexpr const char* kName = "WarpwrightCrossEntropyBackward";
  using Attributes = LossOptions;
  // saved: input, target, weight, row_stats, total_weight, the forward's gradient or none
  static variable_list backward(const Attributes& options, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &input = saved[0], &gradient = saved[5];
    if (gradient.defined() && may_consume_gradient(grads[0], input)) {
      call::cross_entropy_scale_(gradient, grads[0]);
      return {gradient, Tensor()};
    }
    if (options.inplace_backward && may_overwrite(input, saved[1]) &&
        may_consume_gradient(grads[0], input)) {
      // Shares the version: other nodes that saved it detect the write.
      const Tensor logits = input.detach();
      call::cross_entropy_backward_(grads[0], logits, saved[1], optional_if_defined(saved[2]),
                                    saved[3], saved[4], options);
      return {logits, Tensor()};
    }
    auto [grad_input, grad_target] =
        call::cross_entropy_backward(grads[0], saved[0], saved[1], optional_if_defined(saved[2]),
                                     saved[3], saved[4], options, {needs[0], needs[1]});
    return {grad_input, grad_target};
  }
};

struct CrossEntropyBackwardBackward {
  static constexpr const char* kName = "WarpwrightCrossEntropyBackwardBackward";
  using Attributes = LossOptions;
  // saved: grad_output, input, target, weight, row_stats, total_weight
  static variable_list backward(const Attributes& options, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    // The loss is linear in probabilities, so no second derivative contains them twice.
    const bool by_target = needs[2] && grads[0].defined();
    auto [grad_grad_output, grad_input, grad_target] = call::cross_entropy_double_backward(
        optional_if_defined(grads[0]), optional_if_defined(grads[1]), saved[0], saved[1], saved[2],
        optional_if_defined(saved[3]), saved[4], saved[5], options,
        {needs[0], needs[1], by_target});
    return {grad_grad_output, grad_input, grad_target};
  }
};

Tensor3 cross_entropy_forward_autograd(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight, int64_t reduction,
                                       SymInt ignore_index, double label_smoothing,
                                       ScalarType dtype, double z_loss, bool inplace_backward) {
  const LossOptions options{reduction, std::move(ignore_index), label_smoothing, z_loss,
                            inplace_backward};
  check_constants("cross_entropy_forward", weight);
  const Tensor q = if_probabilities(input, target);
  auto node = make_node<CrossEntropyBackward>(options, input, q);
  Tensor gradient;
  auto outputs = below_autograd([&] {
    if (!node || !gradient_in_forward(input, target, options)) {
      return call::cross_entropy_forward(input, target, weight, options, dtype);
    }
    Tensor3 results;
    auto& [loss, row_stats, total_weight] = results;
    std::tie(loss, row_stats, total_weight, gradient) =
        call::cross_entropy_forward_gradient(input, target, weight, options, dtype);
    return results;
  });
  auto& [loss, row_stats, total_weight] = outputs;
  if (node) {
    for (const Tensor& tensor :
         {input, target, value_or_undefined(weight), row_stats, total_weight, gradient}) {
      node->save(tensor);
    }
    set_history(loss, node);
  }
  if (any_tangent(input, q)) {
    set_tangent(loss, std::get<0>(call::cross_entropy_double_backward(
                          optional_tangent(input), optional_tangent(q), primal(loss).detach(),
                          primal(input), primal(target), weight, row_stats, total_weight, options,
                          {true, false, false})));
  }
  return outputs;
}

// An op that overwrites `target` and is not differentiable.
template <class Run>
void write_in_place(const char* op, const Tensor& target, const variable_list& operands,
                    Run&& run) {
  torch::autograd::check_inplace(target, target.requires_grad());
  for (const Tensor& tensor : operands) {
    TORCH_CHECK(!is_differentiated(tensor), op,
                ": expected torch.no_grad(), or tensors that require no gradient: it is not "
                "differentiable");
  }
  below_autograd(run);
  torch::autograd::impl::bump_version(target);
}

Tensor2 cross_entropy_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                        const Tensor& target, const OptionalTensor& weight,
                                        const Tensor& row_stats, const Tensor& total_weight,
                                        int64_t reduction, SymInt ignore_index,
                                        double label_smoothing, Mask2 output_mask, double z_loss) {
  const LossOptions options{reduction, std::move(ignore_index), label_smoothing, z_loss};
  check_constants("cross_entropy_backward", weight, row_stats, total_weight);
  const Tensor q = if_probabilities(input, target);
  auto node = make_node<CrossEntropyBackwardBackward>(options, grad_output, input, q);
  auto run = [&](const Tensor& dloss, const Tensor& z, const Tensor& labels) {
    return call::cross_entropy_backward(dloss, z, labels, weight, row_stats, total_weight, options,
                                        output_mask);
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
    // The loss is linear in grad_output. By input and probabilities the Hessian is symmetric.
    Tensor input_tangent, target_tangent;
    if (has_tangent(grad_output)) {
      std::tie(input_tangent, target_tangent) =
          run(tangent(grad_output), primal(input), primal(target));
    }
    if (any_tangent(input, q)) {
      const auto [ignored, by_input, by_target] = call::cross_entropy_double_backward(
          optional_tangent(input), optional_tangent(q), primal(grad_output), primal(input),
          primal(target), weight, row_stats, total_weight, options,
          {false, output_mask[0], output_mask[1]});
      input_tangent = sum_of(input_tangent, by_input);
      target_tangent = sum_of(target_tangent, by_target);
    }
    if (grad_input.defined()) set_tangent(grad_input, input_tangent);
    if (grad_target.defined()) set_tangent(grad_target, target_tangent);
  }
  return outputs;
}

struct CrossEntropyLseBackward {
  static constexpr const char* kName = "WarpwrightCrossEntropyLseBackward";
  struct Attributes {};
  // saved: input
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad&) {
    const Tensor& input = saved[0];
    const int64_t dim = class_dim(input);
    const Tensor softmax = at::softmax(input.to(grads[0].scalar_type()), dim);
    const Tensor grad = input.dim() == 1 ? grads[0].reshape({1}) : grads[0].unsqueeze(dim);
    return {(softmax * grad).to(input.scalar_type())};
  }
};

// ATen's ops give its derivatives of every order; they are rarely needed.
Tensor cross_entropy_lse_autograd(const Tensor& input, const Tensor& row_stats) {
  check_constant(row_stats, "cross_entropy_lse", "row_stats");
  auto node = make_node<CrossEntropyLseBackward>({}, input);
  Tensor lse = below_autograd([&] { return call::cross_entropy_lse(input, row_stats); });
  if (node) {
    node->save(input);
    set_history(lse, node);
  }
  if (has_tangent(input)) {
    const int64_t dim = class_dim(input);
    const Tensor softmax = at::softmax(primal(input).to(lse.scalar_type()), dim);
    set_tangent(lse, (softmax * tangent(input)).sum(dim).to(lse.scalar_type()));
  }
  return lse;
}

void cross_entropy_backward_inplace_autograd(const Tensor& grad_output, const Tensor& input,
                                             const Tensor& target, const OptionalTensor& weight,
                                             const Tensor& row_stats, const Tensor& total_weight,
                                             int64_t reduction, SymInt ignore_index,
                                             double label_smoothing, double z_loss) {
  const LossOptions options{reduction, std::move(ignore_index), label_smoothing, z_loss};
  write_in_place("cross_entropy_backward_", input, {grad_output, input}, [&] {
    call::cross_entropy_backward_(grad_output, input, target, weight, row_stats, total_weight,
                                  options);
  });
}

Tensor3 cross_entropy_double_backward_autograd(const OptionalTensor& v, const OptionalTensor& u,
                                               const Tensor& grad_output, const Tensor& input,
                                               const Tensor& target, const OptionalTensor& weight,
                                               const Tensor& row_stats, const Tensor& total_weight,
                                               int64_t reduction, SymInt ignore_index,
                                               double label_smoothing, Mask3 output_mask,
                                               double z_loss) {
  const LossOptions options{reduction, std::move(ignore_index), label_smoothing, z_loss};
  check_constants("cross_entropy_double_backward", weight, row_stats, total_weight);
  const Tensor v_tensor = value_or_undefined(v), u_tensor = value_or_undefined(u);
  bool differentiable = false;
  for (const Tensor* tensor : {&v_tensor, &u_tensor, &grad_output, &input, &target}) {
    differentiable |= is_differentiated(*tensor);
  }
  if (differentiable) {
    return differentiable_double_backward(v_tensor, u_tensor, grad_output, input, target,
                                          value_or_undefined(weight), total_weight, options,
                                          output_mask);
  }
  return below_autograd([&] {
    return call::cross_entropy_double_backward(v, u, grad_output, input, target, weight, row_stats,
                                               total_weight, options, output_mask);
  });
}

// A direct call that needs a gradient runs the two ops that it combines, which have all
// derivatives.
Tensor4 cross_entropy_forward_gradient_autograd(const Tensor& input, const Tensor& target,
                                                const OptionalTensor& weight, int64_t reduction,
                                                SymInt ignore_index, double label_smoothing,
                                                ScalarType dtype, double z_loss) {
  const LossOptions options{reduction, std::move(ignore_index), label_smoothing, z_loss};
  check_constants("cross_entropy_forward_gradient", weight);
  if (is_differentiated(input)) {
    const auto [loss, row_stats, total_weight] =
        call::cross_entropy_forward(input, target, weight, options, dtype);
    const Tensor one = at::ones_like(loss.detach());
    const auto [grad_input, ignored] = call::cross_entropy_backward(
        one, input, target, weight, row_stats, total_weight, options, {true, false});
    return {loss, row_stats, total_weight, grad_input};
  }
  return below_autograd(
      [&] { return call::cross_entropy_forward_gradient(input, target, weight, options, dtype); });
}

void cross_entropy_scale_autograd(const Tensor& gradient, const Tensor& factor) {
  write_in_place("cross_entropy_scale_", gradient, {gradient, factor},
                 [&] { call::cross_entropy_scale_(gradient, factor); });
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("cross_entropy_forward", cross_entropy_forward_autograd);
  m.impl("cross_entropy_backward", cross_entropy_backward_autograd);
  m.impl("cross_entropy_double_backward", cross_entropy_double_backward_autograd);
  m.impl("cross_entropy_forward_gradient", cross_entropy_forward_gradient_autograd);
  m.impl("cross_entropy_scale_", cross_entropy_scale_autograd);
  m.impl("cross_entropy_backward_", cross_entropy_backward_inplace_autograd);
  m.impl("cross_entropy_lse", cross_entropy_lse_autograd);
}

}  // namespace warpwright
