// The forward with a ReLU and its backward, through the dispatcher.
#pragma once

#include "ops/batch_norm/torch/common.h"

namespace warpwright {

using Mask4 = std::array<bool, 4>;  // input, weight, bias, residual

namespace call {

inline Tensors4 batch_norm_relu(const Tensor& input, const OptionalTensor& residual,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                const OptionalTensor& running_mean,
                                const OptionalTensor& running_var, bool training, double eps) {
  static const auto op = find_op<Tensors4(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, bool, double)>("warpwright::batch_norm_relu");
  return op.call(input, residual, weight, bias, running_mean, running_var, training, eps);
}

inline Tensors4 batch_norm_relu_update(const Tensor& input, const OptionalTensor& residual,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       Tensor running_mean, Tensor running_var, double momentum,
                                       double eps) {
  static const auto op =
      find_op<Tensors4(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, Tensor, Tensor, double, double)>(
          "warpwright::batch_norm_relu_update");
  return op.call(input, residual, weight, bias, std::move(running_mean), std::move(running_var),
                 momentum, eps);
}

inline Tensors4 batch_norm_relu_backward(const Tensor& grad_output, const Tensor& input,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         const Tensor& mean, const Tensor& rstd, const Tensor& mask,
                                         bool training, Mask4 output_mask) {
  static const auto op =
      find_op<Tensors4(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const Tensor&, const Tensor&, const Tensor&, bool, Mask4)>(
          "warpwright::batch_norm_relu_backward");
  return op.call(grad_output, input, weight, bias, mean, rstd, mask, training, output_mask);
}

}  // namespace call

}  // namespace warpwright
