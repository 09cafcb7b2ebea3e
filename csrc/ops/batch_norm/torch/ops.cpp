// batch_norm, batch_norm_update and batch_norm_backward on every dispatch key. There are two
// forward ops, because only training with running statistics writes to an argument. vmap and
// functionalization treat an op by its schema.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/zeros_like.h>

#include "ops/batch_norm/torch/common.h"

namespace warpwright {
namespace {

// ---- CPU and CUDA ----

BatchNormBackwardCall backward_call_of(const Tensor& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const Tensor& mean,
                                       const Tensor& rstd, bool training, Mask3 mask) {
  return {.grad_output = grad_output,
          .input = input,
          .weight = value_or_undefined(weight),
          .mean = mean,
          .rstd = rstd,
          .training = training,
          .output_mask = {mask[0], mask[1], mask[2], false}};
}

Tensors3 batch_norm_cpu_kernel(const Tensor& input, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& running_mean,
                               const OptionalTensor& running_var, bool training, double eps) {
  return without_last(
      forward_cpu(batch_norm_call(input, weight, bias, running_mean, running_var, training, eps)));
}
Tensors3 batch_norm_update_cpu_kernel(const Tensor& input, const OptionalTensor& weight,
                                      const OptionalTensor& bias, Tensor running_mean,
                                      Tensor running_var, double momentum, double eps) {
  return without_last(forward_cpu(
      batch_norm_update_call(input, weight, bias, running_mean, running_var, momentum, eps)));
}
Tensors3 batch_norm_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                        const OptionalTensor& weight, const Tensor& mean,
                                        const Tensor& rstd, bool training, Mask3 output_mask) {
  return without_last(backward_cpu(
      backward_call_of(grad_output, input, weight, mean, rstd, training, output_mask)));
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensors3 batch_norm_cuda_kernel(const Tensor& input, const OptionalTensor& weight,
                                const OptionalTensor& bias, const OptionalTensor& running_mean,
                                const OptionalTensor& running_var, bool training, double eps) {
  return without_last(
      forward_cuda(batch_norm_call(input, weight, bias, running_mean, running_var, training, eps)));
}
Tensors3 batch_norm_update_cuda_kernel(const Tensor& input, const OptionalTensor& weight,
                                       const OptionalTensor& bias, Tensor running_mean,
                                       Tensor running_var, double momentum, double eps) {
  return without_last(forward_cuda(
      batch_norm_update_call(input, weight, bias, running_mean, running_var, momentum, eps)));
}
Tensors3 batch_norm_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                         const OptionalTensor& weight, const Tensor& mean,
                                         const Tensor& rstd, bool training, Mask3 output_mask) {
  return without_last(backward_cuda(
      backward_call_of(grad_output, input, weight, mean, rstd, training, output_mask)));
}
#endif

// ---- Meta ----

Tensors3 batch_norm_meta(const Tensor& input, const OptionalTensor& weight,
                         const OptionalTensor& bias, const OptionalTensor& running_mean,
                         const OptionalTensor& running_var, bool training, double) {
  check_forward(input, value_or_undefined(weight), value_or_undefined(bias),
                value_or_undefined(running_mean), value_or_undefined(running_var), training);
  return without_last(forward_meta(input));
}
Tensors3 batch_norm_update_meta(const Tensor& input, const OptionalTensor& weight,
                                const OptionalTensor& bias, Tensor running_mean, Tensor running_var,
                                double, double) {
  check_forward(input, value_or_undefined(weight), value_or_undefined(bias), running_mean,
                running_var, /*training=*/true);
  return without_last(forward_meta(input));
}
Tensors3 batch_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                  const OptionalTensor& weight, const Tensor& mean,
                                  const Tensor& rstd, bool, Mask3 mask) {
  check_backward(grad_output, input, value_or_undefined(weight), mean, rstd);
  return without_last(
      backward_meta(input, value_or_undefined(weight), mean, {mask[0], mask[1], mask[2], false}));
}

// ---- derivatives ----

// The quantities of one call in the type of its statistics, in differentiable tensor operations.
// Let P(v) = v - mean(v) - xhat * mean(v * xhat) in training, and P(v) = v in evaluation. The input
// gradient is then weight * rstd * P(grad_output). P is self-adjoint, and d xhat = rstd * P(dx).
class Normalized {
 public:
  Normalized(const Tensor& input, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
             bool training)
      : training_(training), type_(mean.scalar_type()), dims_(input.dim()) {
    const Tensor x = input.to(type_);
    weight_ = weight.defined() ? per_channel(weight) : Tensor();
    // An outer level of torch.func may differentiate by x, though this level does not.
    constexpr c10::DispatchKeySet kNested(
        {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
    if (training && (needs_gradient(input) || input.key_set().has_any(kNested))) {
      // For one more derivative, the saved values are recomputed as functions of x.
      const Tensor center = average(x);
      const Tensor variance = average((x - center) * (x - center));
      rstd_ = (variance - variance.detach() + per_channel(rstd).pow(-2)).rsqrt();
      xhat_ = (x - center) * rstd_;
    } else {
      rstd_ = per_channel(rstd);
      xhat_ = (x - per_channel(mean)) * rstd_;
    }
  }

  Tensor per_channel(const Tensor& vector) const {
    c10::SmallVector<c10::SymInt, 5> shape(dims_, 1);
    shape[dims_ > 1 ? 1 : 0] = vector.sym_numel();  // an empty 1-D input has no channels
    return vector.to(type_).reshape_symint(shape);
  }
  // The mean over all dimensions except the channels.
  Tensor average(const Tensor& value) const { return value.mean(reduced(), /*keepdim=*/true); }
  Tensor sum(const Tensor& value) const { return dims_ > 1 ? value.sum(reduced()) : value; }
  Tensor project(const Tensor& v) const {
    return training_ ? v - average(v) - xhat_ * average(v * xhat_) : v;
  }
  Tensor scaled(const Tensor& v) const { return weight_.defined() ? v * weight_ : v; }

  const Tensor& xhat() const { return xhat_; }
  const Tensor& rstd() const { return rstd_; }
  at::ScalarType type() const { return type_; }

 private:
  c10::SmallVector<int64_t, 5> reduced() const {
    c10::SmallVector<int64_t, 5> dims{0};
    for (int64_t i = 2; i < dims_; ++i) dims.push_back(i);
    return dims;
  }
  bool training_;
  at::ScalarType type_;
  int64_t dims_;
  Tensor weight_, rstd_, xhat_;
};

// The output's change along (v, v_weight, v_bias). It is also the double backward's gradient of
// grad_output, since the backward is the forward's transpose. Undefined directions are zero.
Tensor along(const Tensor& v, const Tensor& v_weight, const Tensor& v_bias, const Tensor& input,
             const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool training) {
  Tensor result;
  if (v.defined()) {
    result = std::get<0>(call_batch_norm_backward(v, input, optional_if_defined(weight), mean, rstd,
                                                  training, {true, false, false}));
  }
  if (v_weight.defined() || v_bias.defined()) {
    const Normalized norm(input, weight, mean, rstd, training);
    Tensor more = v_weight.defined() ? norm.xhat() * norm.per_channel(v_weight)
                                     : Tensor(at::zeros_like(norm.xhat()));
    if (v_bias.defined()) more = more + norm.per_channel(v_bias);
    result = result.defined() ? (result.to(norm.type()) + more).to(input.scalar_type())
                              : more.to(input.scalar_type());
  }
  return result;
}

struct TrainingAttribute {
  bool training;
};

struct BatchNormBackward {  // saved: input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightBatchNormBackward";
  using Attributes = TrainingAttribute;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] =
        call_batch_norm_backward(grads[0], saved[0], optional_if_defined(saved[1]), saved[2],
                                 saved[3], a.training, {needs[0], needs[1], needs[2]});
    return {dx, dw, db};
  }
};

// The gradient of <v, dx> + <v_weight, dweight> + <v_bias, dbias>.
struct BatchNormBackwardBackward {  // saved: grad_output, input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightBatchNormBackwardBackward";
  using Attributes = TrainingAttribute;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2], &mean = saved[3],
                 &rstd = saved[4];
    const Tensor &v = grads[0], &v_weight = grads[1], &v_bias = grads[2];
    Tensor for_grad_output, for_input, for_weight;
    if (needs[0]) {
      for_grad_output = along(v, v_weight, v_bias, input, weight, mean, rstd, a.training);
    }
    if (!needs[1] && !needs[2]) return {for_grad_output, for_input, for_weight};

    const Normalized norm(input, weight, mean, rstd, a.training);
    const Tensor dy = grad_output.to(norm.type());
    const Tensor direction = v.defined() ? v.to(norm.type()) : Tensor();
    Tensor projected;
    if (direction.defined()) projected = direction * norm.project(dy);
    if (needs[2] && direction.defined()) {
      for_weight = norm.sum(projected * norm.rstd()).to(weight.scalar_type());
    }
    if (needs[1]) {
      Tensor result;
      // Through xhat in dweight ...
      Tensor for_xhat = v_weight.defined() ? dy * norm.per_channel(v_weight) : Tensor();
      if (a.training && direction.defined()) {
        // ... through xhat in P, and through rstd.
        const Tensor in_projection =
            norm.scaled(norm.rstd() * (direction * norm.average(dy * norm.xhat()) +
                                       dy * norm.average(direction * norm.xhat())));
        for_xhat = sum_of(for_xhat, -in_projection);
        result = -norm.scaled(norm.xhat() * norm.rstd() * norm.rstd() * norm.average(projected));
      }
      if (for_xhat.defined()) result = sum_of(result, norm.rstd() * norm.project(for_xhat));
      if (result.defined()) for_input = result.to(input.scalar_type());
    }
    return {for_grad_output, for_input, for_weight};
  }
};

// The changes of (dx, dweight, dbias) along the tangents; undefined where zero.
Tensors3 backward_tangents(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           const Tensor& mean, const Tensor& rstd, bool training) {
  auto tangent_or_undefined = [](const Tensor& t) {
    return has_tangent(t) ? tangent(t) : Tensor();
  };
  const Tensor dy_t = tangent_or_undefined(grad_output), x_t = tangent_or_undefined(input),
               w_t = tangent_or_undefined(weight);
  const Tensor x = primal(input), w = weight.defined() ? primal(weight) : weight;
  const Normalized norm(x, w, mean, rstd, training);
  const Tensor dy = primal(grad_output).to(norm.type());
  Tensor dx_t, dw_t, db_t;
  if (dy_t.defined()) {
    const auto [dx, dw, db] = call_batch_norm_backward(dy_t, x, optional_if_defined(w), mean, rstd,
                                                       training, {true, true, true});
    dx_t = dx.to(norm.type());
    dw_t = dw.to(norm.type());
    db_t = db;
  }
  if (w_t.defined()) {
    dx_t = sum_of(dx_t, norm.per_channel(w_t) * norm.rstd() * norm.project(dy));
  }
  if (x_t.defined()) {
    const Tensor direction = x_t.to(norm.type());
    const Tensor xhat_t = norm.rstd() * norm.project(direction);
    dw_t = sum_of(dw_t, norm.sum(dy * xhat_t));
    if (training) {
      const Tensor rstd_t = -norm.rstd() * norm.rstd() * norm.average(norm.xhat() * direction);
      dx_t = sum_of(dx_t, norm.scaled(rstd_t * norm.project(dy) -
                                      norm.rstd() * (xhat_t * norm.average(dy * norm.xhat()) +
                                                     norm.xhat() * norm.average(dy * xhat_t))));
    }
  }
  if (dx_t.defined()) dx_t = dx_t.to(input.scalar_type());
  if (dw_t.defined() && weight.defined()) dw_t = dw_t.to(weight.scalar_type());
  return {dx_t, dw_t, db_t};
}

// ---- Autograd ----

template <class Forward>
Tensors3 forward_autograd(const Tensor& input, const Tensor& weight, const Tensor& bias,
                          const Tensor& running_mean, const Tensor& running_var, bool training,
                          Forward&& forward) {
  check_running_statistics(running_mean, running_var, training);
  auto node = make_node<BatchNormBackward>({training}, input, weight, bias);
  auto [output, mean, rstd] = below_autograd(forward);
  if (node) {
    node->save(input);
    node->save(weight);
    node->save(mean);
    node->save(rstd);
    set_history(output, node);
  }
  if (any_tangent(input, weight, bias)) {
    auto tangent_or_undefined = [](const Tensor& t) {
      return has_tangent(t) ? tangent(t) : Tensor();
    };
    const Tensor direction =
        along(tangent_or_undefined(input), tangent_or_undefined(weight), tangent_or_undefined(bias),
              primal(input), weight.defined() ? primal(weight) : weight, mean, rstd, training);
    set_tangent(output, tangent_with_zero_terms(direction, input, weight));
  }
  return {output, mean, rstd};
}

Tensors3 batch_norm_autograd(const Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var, bool training, double eps) {
  return forward_autograd(
      input, value_or_undefined(weight), value_or_undefined(bias), value_or_undefined(running_mean),
      value_or_undefined(running_var), training, [&] {
        return call_batch_norm(input, weight, bias, running_mean, running_var, training, eps);
      });
}

Tensors3 batch_norm_update_autograd(const Tensor& input, const OptionalTensor& weight,
                                    const OptionalTensor& bias, Tensor running_mean,
                                    Tensor running_var, double momentum, double eps) {
  auto result = forward_autograd(input, value_or_undefined(weight), value_or_undefined(bias),
                                 running_mean, running_var,
                                 /*training=*/true, [&] {
                                   return call_batch_norm_update(input, weight, bias, running_mean,
                                                                 running_var, momentum, eps);
                                 });
  bump_statistics(running_mean, running_var);
  return result;
}

Tensors3 batch_norm_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                      const OptionalTensor& weight, const Tensor& mean,
                                      const Tensor& rstd, bool training, Mask3 output_mask) {
  const Tensor weight_value = value_or_undefined(weight);
  check_constant(mean, "batch_norm_backward", "mean");
  check_constant(rstd, "batch_norm_backward", "rstd");
  auto node = make_node<BatchNormBackwardBackward>({training}, grad_output, input, weight_value);
  auto grads = below_autograd([&] {
    return call_batch_norm_backward(grad_output, input, weight, mean, rstd, training, output_mask);
  });
  auto& [dx, dw, db] = grads;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight_value);
    node->save(mean);
    node->save(rstd);
    set_history({dx, dw, db}, node);
  }
  if (any_tangent(grad_output, input, weight_value)) {
    const auto [dx_t, dw_t, db_t] =
        backward_tangents(grad_output, input, weight_value, mean, rstd, training);
    if (dx.defined() && dx_t.defined()) set_tangent(dx, dx_t);
    if (dw.defined() && dw_t.defined()) set_tangent(dw, dw_t);
    if (db.defined() && db_t.defined()) set_tangent(db, db_t);
  }
  return grads;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, bool training, float eps) -> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_update(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
      "Tensor(b!) running_var, float momentum, float eps) "
      "-> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, bool training, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("batch_norm", batch_norm_cpu_kernel);
  m.impl("batch_norm_update", batch_norm_update_cpu_kernel);
  m.impl("batch_norm_backward", batch_norm_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("batch_norm", batch_norm_cuda_kernel);
  m.impl("batch_norm_update", batch_norm_update_cuda_kernel);
  m.impl("batch_norm_backward", batch_norm_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("batch_norm", batch_norm_meta);
  m.impl("batch_norm_update", batch_norm_update_meta);
  m.impl("batch_norm_backward", batch_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("batch_norm", batch_norm_autograd);
  m.impl("batch_norm_update", batch_norm_update_autograd);
  m.impl("batch_norm_backward", batch_norm_backward_autograd);
}

}  // namespace warpwright
