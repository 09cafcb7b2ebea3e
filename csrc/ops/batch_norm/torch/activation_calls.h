// The forward with an activation and its backward, through the dispatcher.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "ops/batch_norm/torch/common.h"

namespace warpwright {

// The activation of this name among those that `op` takes.
inline NormActivation find_norm_activation(std::string_view name, const char* op,
                                           std::initializer_list<NormActivation> known) {
  std::string names;
  size_t left = known.size();
  for (const NormActivation activation : known) {
    if (name == norm_activation_name(activation)) return activation;
    --left;
    names += norm_activation_name(activation);
    names += left > 1 ? ", " : left == 1 ? " or " : "";
  }
  TORCH_CHECK(false, op, ": activation: expected ", names, ", got ", name);
}

namespace call {

inline Tensors3 batch_norm_activation(const Tensor& input, const OptionalTensor& weight,
                                      const OptionalTensor& bias,
                                      const OptionalTensor& running_mean,
                                      const OptionalTensor& running_var, bool training, double eps,
                                      std::string_view activation) {
  static const auto op = find_op<Tensors3(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, bool, double, std::string_view)>("warpwright::batch_norm_activation");
  return op.call(input, weight, bias, running_mean, running_var, training, eps, activation);
}

inline Tensors3 batch_norm_activation_update(const Tensor& input, const OptionalTensor& weight,
                                             const OptionalTensor& bias, Tensor running_mean,
                                             Tensor running_var, double momentum, double eps,
                                             std::string_view activation) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const OptionalTensor&, const OptionalTensor&, Tensor, Tensor,
                       double, double, std::string_view)>(
          "warpwright::batch_norm_activation_update");
  return op.call(input, weight, bias, std::move(running_mean), std::move(running_var), momentum,
                 eps, activation);
}

inline Tensors3 batch_norm_activation_backward(const Tensor& grad_output, const Tensor& input,
                                               const OptionalTensor& weight,
                                               const OptionalTensor& bias, const Tensor& mean,
                                               const Tensor& rstd, bool training, double eps,
                                               std::string_view activation,
                                               std::array<bool, 3> output_mask) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const Tensor&, const Tensor&, bool, double, std::string_view,
                       std::array<bool, 3>)>("warpwright::batch_norm_activation_backward");
  return op.call(grad_output, input, weight, bias, mean, rstd, training, eps, activation,
                 output_mask);
}

}  // namespace call

}  // namespace warpwright
