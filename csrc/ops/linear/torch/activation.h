// linear_activation's ops through the dispatcher, for the files of torch/.
#pragma once

#include <string_view>
#include <tuple>

#include "common/activation.h"
#include "ops/linear/torch/common.h"
#include "torch/activation.h"

namespace warpwright {

namespace linear_ops {

// (output, pre-activation if `keep`)
std::tuple<Tensor, Tensor> linear_activation(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias,
                                             std::string_view activation, bool keep);

// (dz, bias gradient if wanted)
std::tuple<Tensor, Tensor> linear_activation_backward(const Tensor& grad_output, const Tensor& kept,
                                                      std::string_view activation,
                                                      bool bias_gradient,
                                                      bool float32_bias = false);

}  // namespace linear_ops

inline Activation find_linear_activation(std::string_view name) {
  return find_activation(
      name, "linear_activation",
      {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu});
}

}  // namespace warpwright
