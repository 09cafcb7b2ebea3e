// batch_norm_relu, batch_norm_relu_update and batch_norm_relu_backward on every dispatch key:
// relu(batch_norm(input) + residual) in one op. There are two forward ops, as for batch norm. The
// backward with an output_mask of the residual alone is the relu's gate, which is linear in
// grad_output. Higher derivatives and tangents are composed of the gate's and batch norm's.
#include <ATen/TensorOperators.h>
#include <ATen/ops/threshold_backward.h>

#include "ops/batch_norm/torch/relu_calls.h"

namespace warpwright {
namespace {

constexpr Mask4 kGateOnly = {false, false, false, true};

// ---- checks ----

void check_residual(const Tensor& input, const Tensor& residual) {
  if (!residual.defined()) return;
  TORCH_CHECK(residual.sym_sizes() == input.sym_sizes(),
              "batch_norm_add_relu: residual: expected shape ", input.sym_sizes(), ", got ",
              residual.sym_sizes());
  TORCH_CHECK(residual.scalar_type() == input.scalar_type(),
              "batch_norm_add_relu: residual: expected ", input.scalar_type(), ", got ",
              residual.scalar_type());
  TORCH_CHECK(
      residual.device() == input.device(),
      "batch_norm_add_relu: Expected all tensors to be on the same device, but input is on ",
      input.device(), " and residual is on ", residual.device());
}

void check_gate(const Tensor& input, const Tensor& bias, const Tensor& mask) {
  check_vector(bias, "bias", input);
  check_same_device(mask, input, "batch_norm_relu_backward: mask");
  TORCH_CHECK(mask.scalar_type() == at::kByte && mask.dim() == 1,
              "batch_norm_relu_backward: mask: expected 1 dimension of Byte, got ", mask.dim(),
              " of ", mask.scalar_type());
  if (mask.sym_numel() == 0) return;
  const c10::SymInt bytes =
      mask_bytes(input.sym_sizes(), output_format(input), input.element_size());
  TORCH_CHECK(mask.sym_numel() == bytes, "batch_norm_relu_backward: mask: expected ", bytes,
              " bytes or none, got ", mask.sym_numel());
}

// ---- CPU and CUDA ----

BatchNormCall call_of(const Tensor& input, const OptionalTensor& residual,
                      const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var,
                      bool training, double eps) {
  check_input(input);
  check_residual(input, value_or_undefined(residual));
  BatchNormCall call =
      batch_norm_call(input, weight, bias, running_mean, running_var, training, eps);
  call.activation = NormActivation::kRelu;
  call.residual = value_or_undefined(residual);
  return call;
}
BatchNormCall update_call_of(const Tensor& input, const OptionalTensor& residual,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             const Tensor& running_mean, const Tensor& running_var, double momentum,
                             double eps) {
  BatchNormCall call = call_of(input, residual, weight, bias, running_mean, running_var,
                               /*training=*/true, eps);
  call.update = true;
  call.momentum = momentum;
  return call;
}
BatchNormBackwardCall backward_call_of(const Tensor& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       const Tensor& mean, const Tensor& rstd, const Tensor& mask,
                                       bool training, Mask4 output_mask) {
  check_gate(input, value_or_undefined(bias), mask);
  return {.grad_output = grad_output,
          .input = input,
          .weight = value_or_undefined(weight),
          .mean = mean,
          .rstd = rstd,
          .training = training,
          .output_mask = output_mask,
          .activation = NormActivation::kRelu,
          .bias = value_or_undefined(bias),
          .mask = mask};
}

Tensors4 batch_norm_relu_cpu_kernel(const Tensor& input, const OptionalTensor& residual,
                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                    const OptionalTensor& running_mean,
                                    const OptionalTensor& running_var, bool training, double eps) {
  return forward_cpu(
      call_of(input, residual, weight, bias, running_mean, running_var, training, eps));
}
Tensors4 batch_norm_relu_update_cpu_kernel(const Tensor& input, const OptionalTensor& residual,
                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                           Tensor running_mean, Tensor running_var, double momentum,
                                           double eps) {
  return forward_cpu(
      update_call_of(input, residual, weight, bias, running_mean, running_var, momentum, eps));
}
Tensors4 batch_norm_relu_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                             const OptionalTensor& weight,
                                             const OptionalTensor& bias, const Tensor& mean,
                                             const Tensor& rstd, const Tensor& mask, bool training,
                                             Mask4 output_mask) {
  return backward_cpu(
      backward_call_of(grad_output, input, weight, bias, mean, rstd, mask, training, output_mask));
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensors4 batch_norm_relu_cuda_kernel(const Tensor& input, const OptionalTensor& residual,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& running_mean,
                                     const OptionalTensor& running_var, bool training, double eps) {
  return forward_cuda(
      call_of(input, residual, weight, bias, running_mean, running_var, training, eps));
}
Tensors4 batch_norm_relu_update_cuda_kernel(const Tensor& input, const OptionalTensor& residual,
                                            const OptionalTensor& weight,
                                            const OptionalTensor& bias, Tensor running_mean,
                                            Tensor running_var, double momentum, double eps) {
  return forward_cuda(
      update_call_of(input, residual, weight, bias, running_mean, running_var, momentum, eps));
}
Tensors4 batch_norm_relu_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                              const OptionalTensor& weight,
                                              const OptionalTensor& bias, const Tensor& mean,
                                              const Tensor& rstd, const Tensor& mask, bool training,
                                              Mask4 output_mask) {
  return backward_cuda(
      backward_call_of(grad_output, input, weight, bias, mean, rstd, mask, training, output_mask));
}
#endif

// ---- Meta ----

Tensors4 batch_norm_relu_meta(const Tensor& input, const OptionalTensor& residual,
                              const OptionalTensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& running_mean, const OptionalTensor& running_var,
                              bool training, double) {
  check_input(input);
  check_residual(input, value_or_undefined(residual));
  check_forward(input, value_or_undefined(weight), value_or_undefined(bias),
                value_or_undefined(running_mean), value_or_undefined(running_var), training);
  return forward_meta(input, value_or_undefined(residual));
}
Tensors4 batch_norm_relu_update_meta(const Tensor& input, const OptionalTensor& residual,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     Tensor running_mean, Tensor running_var, double, double eps) {
  return batch_norm_relu_meta(input, residual, weight, bias, running_mean, running_var,
                              /*training=*/true, eps);
}
Tensors4 batch_norm_relu_backward_meta(const Tensor& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       const Tensor& mean, const Tensor& rstd, const Tensor& mask,
                                       bool, Mask4 output_mask) {
  check_gate(input, value_or_undefined(bias), mask);
  check_backward(grad_output, input, value_or_undefined(weight), mean, rstd);
  return backward_meta(input, value_or_undefined(weight), mean, output_mask);
}

// ---- Autograd ----

struct BatchNormReluBackward {  // saved: input, weight, bias, mean, rstd, mask
  static constexpr const char* kName = "WarpwrightBatchNormReluBackward";
  static constexpr bool kPiecewiseLinear = true;
  struct Attributes {
    bool training;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db, dz] = call::batch_norm_relu_backward(
        grads[0], saved[0], optional_if_defined(saved[1]), optional_if_defined(saved[2]), saved[3],
        saved[4], saved[5], a.training, {needs[0], needs[1], needs[2], needs[3]});
    return {dx, dw, db, dz};
  }
};

struct BatchNormReluGateBackward {  // saved: input, weight, bias, mean, rstd, mask
  static constexpr const char* kName = "WarpwrightBatchNormReluGateBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad&) {
    return {std::get<3>(call::batch_norm_relu_backward(
        grads[0], saved[0], optional_if_defined(saved[1]), optional_if_defined(saved[2]), saved[3],
        saved[4], saved[5], /*training=*/false, kGateOnly))};
  }
};

template <class Node>
void save_gate(Node& node, const Tensor& input, const Tensor& weight, const Tensor& bias,
               const Tensor& mean, const Tensor& rstd, const Tensor& mask) {
  for (const Tensor* tensor : {&input, &weight, &bias, &mean, &rstd, &mask}) node->save(*tensor);
}

template <class Forward>
Tensors4 relu_forward_autograd(const BatchNormCall& c, Forward&& forward) {
  check_running_statistics(c.running_mean, c.running_var, c.training);
  auto node = make_node<BatchNormReluBackward>({c.training}, c.input, c.weight, c.bias, c.residual);
  // Before a training step moves the running statistics.
  Tensor direction;
  if (any_tangent(c.input, c.weight, c.bias)) direction = tangent(without_activation(c));
  auto results = below_autograd(forward);
  const auto& [output, mean, rstd, mask] = results;
  if (node) {
    save_gate(node, c.input, c.weight, c.bias, mean, rstd, mask);
    set_history(output, node);
  }
  if (has_tangent(c.residual)) {
    direction = direction.defined() ? direction + tangent(c.residual) : tangent(c.residual);
  }
  if (direction.defined()) {
    const Tensor passed = at::threshold_backward(direction, primal(output), 0);
    set_tangent(output, tangent_with_zero_terms(passed, c.input, c.weight, c.bias, c.residual));
  }
  return results;
}

Tensors4 batch_norm_relu_autograd(const Tensor& input, const OptionalTensor& residual,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var, bool training, double eps) {
  return relu_forward_autograd(
      call_of(input, residual, weight, bias, running_mean, running_var, training, eps), [&] {
        return call::batch_norm_relu(input, residual, weight, bias, running_mean, running_var,
                                     training, eps);
      });
}

Tensors4 batch_norm_relu_update_autograd(const Tensor& input, const OptionalTensor& residual,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         Tensor running_mean, Tensor running_var, double momentum,
                                         double eps) {
  auto results = relu_forward_autograd(
      update_call_of(input, residual, weight, bias, running_mean, running_var, momentum, eps), [&] {
        return call::batch_norm_relu_update(input, residual, weight, bias, running_mean,
                                            running_var, momentum, eps);
      });
  bump_statistics(running_mean, running_var);
  return results;
}

Tensors4 batch_norm_relu_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                           const Tensor& mean, const Tensor& rstd,
                                           const Tensor& mask, bool training, Mask4 output_mask) {
  const Tensor weight_value = value_or_undefined(weight);
  check_constant(mean, "batch_norm_relu_backward", "mean");
  check_constant(rstd, "batch_norm_relu_backward", "rstd");
  auto below = [&](Mask4 wanted) {
    return below_autograd([&] {
      return call::batch_norm_relu_backward(grad_output, input, weight, bias, mean, rstd, mask,
                                            training, wanted);
    });
  };
  const bool through_dout = is_differentiated(grad_output);
  const bool through_norm = is_differentiated(input) || is_differentiated(weight_value);
  const bool norm_wanted = output_mask[0] || output_mask[1] || output_mask[2];
  if (!through_dout && !(through_norm && norm_wanted)) return below(output_mask);

  // To be differentiated, it runs as the gate followed by batch norm's own backward.
  auto node = make_node<BatchNormReluGateBackward>({}, grad_output);
  Tensor gated = std::get<3>(below(kGateOnly));
  if (node) {
    save_gate(node, input, weight_value, value_or_undefined(bias), mean, rstd, mask);
    set_history(gated, node);
  }
  if (has_tangent(grad_output)) {
    set_tangent(gated, std::get<3>(call::batch_norm_relu_backward(
                           tangent(grad_output), primal(input), weight, bias, mean, rstd, mask,
                           training, kGateOnly)));
  }
  Tensor dx, dw, db;
  if (norm_wanted) {
    std::tie(dx, dw, db) =
        call_batch_norm_backward(gated, input, weight, mean, rstd, training,
                                 {output_mask[0], output_mask[1], output_mask[2]});
  }
  return {dx, dw, db, output_mask[3] ? gated : Tensor()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "batch_norm_relu(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor? running_mean, Tensor? running_var, bool training, float eps) "
      "-> (Tensor output, Tensor mean, Tensor rstd, Tensor mask)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_relu_update(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor(a!) running_mean, Tensor(b!) running_var, float momentum, float eps) "
      "-> (Tensor output, Tensor mean, Tensor rstd, Tensor mask)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_relu_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, Tensor mask, bool training, bool[4] output_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("batch_norm_relu", batch_norm_relu_cpu_kernel);
  m.impl("batch_norm_relu_update", batch_norm_relu_update_cpu_kernel);
  m.impl("batch_norm_relu_backward", batch_norm_relu_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("batch_norm_relu", batch_norm_relu_cuda_kernel);
  m.impl("batch_norm_relu_update", batch_norm_relu_update_cuda_kernel);
  m.impl("batch_norm_relu_backward", batch_norm_relu_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("batch_norm_relu", batch_norm_relu_meta);
  m.impl("batch_norm_relu_update", batch_norm_relu_update_meta);
  m.impl("batch_norm_relu_backward", batch_norm_relu_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("batch_norm_relu", batch_norm_relu_autograd);
  m.impl("batch_norm_relu_update", batch_norm_relu_update_autograd);
  m.impl("batch_norm_relu_backward", batch_norm_relu_backward_autograd);
}

}  // namespace warpwright
