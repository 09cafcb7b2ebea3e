// batch_norm_activation, batch_norm_activation_update and batch_norm_activation_backward on every
// dispatch key: silu(batch_norm(input)) or hardswish(batch_norm(input)) in one op. There are two
// forward ops, as for batch norm. relu has ops of its own (relu_ops.cpp), which also take a
// residual.
#include <ATen/TensorOperators.h>
#include <ATen/ops/hardswish_backward.h>

#include "ops/batch_norm/torch/activation_calls.h"

namespace warpwright {
namespace {

NormActivation find_activation(std::string_view name) {
  return find_norm_activation(name, "batch_norm_activation",
                              {NormActivation::kSilu, NormActivation::kHardswish});
}

// ---- CPU and CUDA ----

BatchNormCall call_of(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var,
                      bool training, double eps, std::string_view activation) {
  BatchNormCall call =
      batch_norm_call(input, weight, bias, running_mean, running_var, training, eps);
  call.activation = find_activation(activation);
  return call;
}
BatchNormCall update_call_of(const Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const Tensor& running_mean,
                             const Tensor& running_var, double momentum, double eps,
                             std::string_view activation) {
  BatchNormCall call =
      batch_norm_update_call(input, weight, bias, running_mean, running_var, momentum, eps);
  call.activation = find_activation(activation);
  return call;
}
BatchNormBackwardCall backward_call_of(const Tensor& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       const Tensor& mean, const Tensor& rstd, bool training,
                                       std::string_view activation, Mask3 mask) {
  check_vector(value_or_undefined(bias), "bias", input);
  return {.grad_output = grad_output,
          .input = input,
          .weight = value_or_undefined(weight),
          .mean = mean,
          .rstd = rstd,
          .training = training,
          .output_mask = {mask[0], mask[1], mask[2], false},
          .activation = find_activation(activation),
          .bias = value_or_undefined(bias)};
}

// kRun: forward_cpu or forward_cuda.
template <Tensors4 (*kRun)(const BatchNormCall&)>
Tensors3 forward_kernel(const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& running_mean,
                        const OptionalTensor& running_var, bool training, double eps,
                        std::string_view activation) {
  return without_last(
      kRun(call_of(input, weight, bias, running_mean, running_var, training, eps, activation)));
}
template <Tensors4 (*kRun)(const BatchNormCall&)>
Tensors3 update_kernel(const Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias, Tensor running_mean, Tensor running_var,
                       double momentum, double eps, std::string_view activation) {
  return without_last(kRun(
      update_call_of(input, weight, bias, running_mean, running_var, momentum, eps, activation)));
}
template <Tensors4 (*kRun)(const BatchNormBackwardCall&)>
Tensors3 backward_kernel(const Tensor& grad_output, const Tensor& input,
                         const OptionalTensor& weight, const OptionalTensor& bias,
                         const Tensor& mean, const Tensor& rstd, bool training, double,
                         std::string_view activation, Mask3 output_mask) {
  return without_last(kRun(backward_call_of(grad_output, input, weight, bias, mean, rstd, training,
                                            activation, output_mask)));
}

// ---- Meta ----

Tensors3 batch_norm_activation_meta(const Tensor& input, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& running_mean,
                                    const OptionalTensor& running_var, bool training, double,
                                    std::string_view activation) {
  find_activation(activation);
  check_forward(input, value_or_undefined(weight), value_or_undefined(bias),
                value_or_undefined(running_mean), value_or_undefined(running_var), training);
  return without_last(forward_meta(input));
}
Tensors3 batch_norm_activation_update_meta(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias, Tensor running_mean,
                                           Tensor running_var, double, double eps,
                                           std::string_view activation) {
  return batch_norm_activation_meta(input, weight, bias, running_mean, running_var,
                                    /*training=*/true, eps, activation);
}
Tensors3 batch_norm_activation_backward_meta(const Tensor& grad_output, const Tensor& input,
                                             const OptionalTensor& weight,
                                             const OptionalTensor& bias, const Tensor& mean,
                                             const Tensor& rstd, bool, double,
                                             std::string_view activation, Mask3 mask) {
  find_activation(activation);
  check_vector(value_or_undefined(bias), "bias", input);
  check_backward(grad_output, input, value_or_undefined(weight), mean, rstd);
  return without_last(
      backward_meta(input, value_or_undefined(weight), mean, {mask[0], mask[1], mask[2], false}));
}

// ---- Autograd ----

// gradient times the derivative at z, as a differentiable function of both.
Tensor times_derivative(const Tensor& gradient, const Tensor& z, NormActivation activation) {
  if (activation == NormActivation::kHardswish) return at::hardswish_backward(gradient, z);
  const Tensor s = z.sigmoid();
  return gradient * (s * (z * (1 - s) + 1));
}

// The normalised value in the type of the statistics, as a differentiable function.
Tensor normalized(const Tensor& input, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                  const Tensor& rstd, bool training, double eps) {
  const auto type = mean.scalar_type();
  auto wide = [&](const Tensor& tensor) {
    return tensor.defined() ? std::optional<Tensor>(tensor.to(type)) : std::nullopt;
  };
  if (training) {  // the statistics are functions of the input
    return std::get<0>(call_batch_norm(input.to(type), wide(weight), wide(bias), std::nullopt,
                                       std::nullopt, /*training=*/true, eps));
  }
  c10::SmallVector<c10::SymInt, 5> shape(input.dim(), 1);
  if (input.dim() > 1) shape[1] = input.sym_size(1);
  Tensor scale = rstd.reshape_symint(shape);
  if (weight.defined()) scale = scale * weight.to(type).reshape_symint(shape);
  const Tensor z = (input.to(type) - mean.reshape_symint(shape)) * scale;
  return bias.defined() ? z + bias.to(type).reshape_symint(shape) : z;
}

struct BatchNormActivationBackward {  // saved: input, weight, bias, mean, rstd
  static constexpr const char* kName = "WarpwrightBatchNormActivationBackward";
  struct Attributes {
    bool training;
    double eps;
    NormActivation activation;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] = call::batch_norm_activation_backward(
        grads[0], saved[0], optional_if_defined(saved[1]), optional_if_defined(saved[2]), saved[3],
        saved[4], a.training, a.eps, norm_activation_name(a.activation),
        {needs[0], needs[1], needs[2]});
    return {dx, dw, db};
  }
};

template <class Forward>
Tensors3 activation_forward_autograd(const BatchNormCall& c, Forward&& forward) {
  check_running_statistics(c.running_mean, c.running_var, c.training);
  auto node = make_node<BatchNormActivationBackward>({c.training, c.eps, c.activation}, c.input,
                                                     c.weight, c.bias);
  // Before a training step moves the running statistics.
  Tensor direction;
  if (any_tangent(c.input, c.weight, c.bias)) {
    const Tensor plain = without_activation(c);
    direction = times_derivative(tangent(plain), primal(plain), c.activation);
  }
  auto results = below_autograd(forward);
  const auto& [output, mean, rstd] = results;
  if (node) {
    for (const Tensor* tensor : {&c.input, &c.weight, &c.bias, &mean, &rstd}) node->save(*tensor);
    set_history(output, node);
  }
  if (direction.defined()) set_tangent(output, direction);
  return results;
}

Tensors3 batch_norm_activation_autograd(const Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& bias,
                                        const OptionalTensor& running_mean,
                                        const OptionalTensor& running_var, bool training,
                                        double eps, std::string_view activation) {
  return activation_forward_autograd(
      call_of(input, weight, bias, running_mean, running_var, training, eps, activation), [&] {
        return call::batch_norm_activation(input, weight, bias, running_mean, running_var, training,
                                           eps, activation);
      });
}

Tensors3 batch_norm_activation_update_autograd(const Tensor& input, const OptionalTensor& weight,
                                               const OptionalTensor& bias, Tensor running_mean,
                                               Tensor running_var, double momentum, double eps,
                                               std::string_view activation) {
  auto results = activation_forward_autograd(
      update_call_of(input, weight, bias, running_mean, running_var, momentum, eps, activation),
      [&] {
        return call::batch_norm_activation_update(input, weight, bias, running_mean, running_var,
                                                  momentum, eps, activation);
      });
  bump_statistics(running_mean, running_var);
  return results;
}

Tensors3 batch_norm_activation_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                                 const OptionalTensor& weight,
                                                 const OptionalTensor& bias, const Tensor& mean,
                                                 const Tensor& rstd, bool training, double eps,
                                                 std::string_view activation, Mask3 output_mask) {
  check_constant(mean, "batch_norm_activation_backward", "mean");
  check_constant(rstd, "batch_norm_activation_backward", "rstd");
  const Tensor weight_value = value_or_undefined(weight), bias_value = value_or_undefined(bias);
  if (!is_differentiated(grad_output) && !is_differentiated(input) &&
      !is_differentiated(weight_value) && !is_differentiated(bias_value)) {
    return below_autograd([&] {
      return call::batch_norm_activation_backward(grad_output, input, weight, bias, mean, rstd,
                                                  training, eps, activation, output_mask);
    });
  }
  // To be differentiated, it runs as the activation's backward, then batch norm's own.
  const Tensor z = normalized(input, weight_value, bias_value, mean, rstd, training, eps);
  const Tensor gated =
      times_derivative(grad_output.to(z.scalar_type()), z, find_activation(activation));
  return call_batch_norm_backward(gated.to(input.scalar_type()), input, weight, mean, rstd,
                                  training, output_mask);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "batch_norm_activation(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, bool training, float eps, str activation) "
      "-> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_activation_update(Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor(a!) running_mean, Tensor(b!) running_var, float momentum, float eps, str activation) "
      "-> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_activation_backward(Tensor grad_output, Tensor input, Tensor? weight, "
      "Tensor? bias, Tensor mean, Tensor rstd, bool training, float eps, str activation, "
      "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("batch_norm_activation", forward_kernel<forward_cpu>);
  m.impl("batch_norm_activation_update", update_kernel<forward_cpu>);
  m.impl("batch_norm_activation_backward", backward_kernel<backward_cpu>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("batch_norm_activation", forward_kernel<forward_cuda>);
  m.impl("batch_norm_activation_update", update_kernel<forward_cuda>);
  m.impl("batch_norm_activation_backward", backward_kernel<backward_cuda>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("batch_norm_activation", batch_norm_activation_meta);
  m.impl("batch_norm_activation_update", batch_norm_activation_update_meta);
  m.impl("batch_norm_activation_backward", batch_norm_activation_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("batch_norm_activation", batch_norm_activation_autograd);
  m.impl("batch_norm_activation_update", batch_norm_activation_update_autograd);
  m.impl("batch_norm_activation_backward", batch_norm_activation_backward_autograd);
}

}  // namespace warpwright
