// Shared by the files of torch/: the arguments of a call, and the ops through the dispatcher.
#pragma once

#include "ops/batch_norm/torch/activation_calls.h"
#include "ops/batch_norm/torch/relu_calls.h"
#include "ops/conv2d/torch/common.h"

namespace warpwright::conv_norm {

// The output, the convolution's output, mean, rstd, and the relu's mask.
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline constexpr auto kConvNormActivations = {NormActivation::kNone, NormActivation::kRelu,
                                              NormActivation::kSilu, NormActivation::kHardswish};

struct Call {
  const Tensor &input, &weight;
  Tensor bias;
  Tensor residual;  // with kRelu only
  Tensor norm_weight, norm_bias;
  Tensor running_mean, running_var;  // both, if the call updates them
  double momentum, eps;
  NormActivation activation;
  Conv2dGeometry geometry;

  bool updates() const { return running_mean.defined(); }
};

inline Call call_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& residual, const OptionalTensor& norm_weight,
                    const OptionalTensor& norm_bias, double eps, std::string_view activation,
                    SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                    SymInt groups) {
  return {.input = input,
          .weight = weight,
          .bias = value_or_undefined(bias),
          .residual = value_or_undefined(residual),
          .norm_weight = value_or_undefined(norm_weight),
          .norm_bias = value_or_undefined(norm_bias),
          .running_mean = {},
          .running_var = {},
          .momentum = 0,
          .eps = eps,
          .activation = find_norm_activation(activation, "conv2d_batch_norm", kConvNormActivations),
          .geometry = geometry_of(stride, padding, dilation, std::move(groups))};
}

inline Call update_call_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& residual, const OptionalTensor& norm_weight,
                           const OptionalTensor& norm_bias, const Tensor& running_mean,
                           const Tensor& running_var, double momentum, double eps,
                           std::string_view activation, SymIntArrayRef stride,
                           SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups) {
  Call call = call_of(input, weight, bias, residual, norm_weight, norm_bias, eps, activation,
                      stride, padding, dilation, std::move(groups));
  call.running_mean = running_mean;
  call.running_var = running_var;
  call.momentum = momentum;
  return call;
}

// The op of a call through the dispatcher.
inline Tensors5 dispatch(const Call& c) {
  const Conv2dGeometry& g = c.geometry;
  const std::string_view activation = norm_activation_name(c.activation);
  if (c.updates()) {
    static const auto op =
        find_op<Tensors5(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&, Tensor, Tensor, double,
                         double, std::string_view, SymIntArrayRef, SymIntArrayRef, SymIntArrayRef,
                         SymInt)>("warpwright::conv2d_batch_norm_update");
    return op.call(c.input, c.weight, optional_if_defined(c.bias), optional_if_defined(c.residual),
                   optional_if_defined(c.norm_weight), optional_if_defined(c.norm_bias),
                   c.running_mean, c.running_var, c.momentum, c.eps, activation, g.stride,
                   g.padding, g.dilation, g.groups);
  }
  static const auto op =
      find_op<Tensors5(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, const OptionalTensor&, double, std::string_view,
                       SymIntArrayRef, SymIntArrayRef, SymIntArrayRef, SymInt)>(
          "warpwright::conv2d_batch_norm");
  return op.call(c.input, c.weight, optional_if_defined(c.bias), optional_if_defined(c.residual),
                 optional_if_defined(c.norm_weight), optional_if_defined(c.norm_bias), c.eps,
                 activation, g.stride, g.padding, g.dilation, g.groups);
}

}  // namespace warpwright::conv_norm
