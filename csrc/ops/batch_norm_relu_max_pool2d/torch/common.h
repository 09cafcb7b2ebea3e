// Shared by the files of torch/: the ops through the dispatcher, checks, and a call's arguments.
#pragma once

#include "ops/batch_norm/torch/common.h"
#include "ops/batch_norm_relu_max_pool2d/batch_norm_relu_max_pool2d.h"
#include "ops/max_pool2d/torch/common.h"

namespace warpwright::batch_norm_pool {

using Mask3 = std::array<bool, 3>;
// Output, mean, rstd, codes, winners.
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The ops through the dispatcher.
namespace call {

inline Tensors5 batch_norm_relu_max_pool2d(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias,
                                           const OptionalTensor& running_mean,
                                           const OptionalTensor& running_var, bool training,
                                           double eps, const PoolWindow& w, bool ceil_mode,
                                           bool save) {
  static const auto op =
      find_op<Tensors5(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, const OptionalTensor&, bool, double, IntArrayRef,
                       IntArrayRef, IntArrayRef, IntArrayRef, bool, bool)>(
          "warpwright::batch_norm_relu_max_pool2d");
  return op.call(input, weight, bias, running_mean, running_var, training, eps, w.kernel, w.stride,
                 w.padding, w.dilation, ceil_mode, save);
}

inline Tensors5 batch_norm_relu_max_pool2d_update(const Tensor& input, const OptionalTensor& weight,
                                                  const OptionalTensor& bias, Tensor running_mean,
                                                  Tensor running_var, double momentum, double eps,
                                                  const PoolWindow& w, bool ceil_mode, bool save) {
  static const auto op =
      find_op<Tensors5(const Tensor&, const OptionalTensor&, const OptionalTensor&, Tensor, Tensor,
                       double, double, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool,
                       bool)>("warpwright::batch_norm_relu_max_pool2d_update");
  return op.call(input, weight, bias, std::move(running_mean), std::move(running_var), momentum,
                 eps, w.kernel, w.stride, w.padding, w.dilation, ceil_mode, save);
}

inline Tensors3 batch_norm_relu_max_pool2d_backward(const Tensor& grad_output, const Tensor& input,
                                                    const Tensor& codes, const Tensor& winners,
                                                    const OptionalTensor& weight,
                                                    const OptionalTensor& bias, const Tensor& mean,
                                                    const Tensor& rstd, bool training,
                                                    const PoolWindow& w, Mask3 output_mask) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                       bool, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, Mask3)>(
          "warpwright::batch_norm_relu_max_pool2d_backward");
  return op.call(grad_output, input, codes, winners, weight, bias, mean, rstd, training, w.kernel,
                 w.stride, w.padding, w.dilation, output_mask);
}

}  // namespace call

inline void check_images(const Tensor& input) {
  check_input(input);
  TORCH_CHECK(input.dim() == 4, "batch_norm_relu_max_pool2d: expected 4D input (got ", input.dim(),
              "D input)");
}

inline bool walks_channels_last(const Tensor& input) {
  return output_format(input) == at::MemoryFormat::ChannelsLast;
}

inline void check_saved(const Tensor& grad_output, const Tensor& input, const Tensor& codes,
                        const Tensor& winners, const Tensor& bias, const PoolWindow& w) {
  constexpr const char* kOp = "batch_norm_relu_max_pool2d_backward";
  check_images(input);
  check_pool_codes(kOp, codes, input.sym_sizes(), w);
  check_pooled_shape(kOp, "grad_output", grad_output, codes);
  check_pooled_shape(kOp, "winners", winners, codes);
  for (const auto& [name, tensor] :
       {std::pair("grad_output", &grad_output), {"winners", &winners}}) {
    TORCH_CHECK(tensor->scalar_type() == input.scalar_type(), kOp, ": ", name, ": expected ",
                input.scalar_type(), ", got ", tensor->scalar_type());
  }
  check_same_device(codes, input, "batch_norm_relu_max_pool2d_backward: codes");
  check_vector(bias, "bias", input);
}

inline BatchNormCall call_of(const Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var, bool training, double eps) {
  BatchNormCall call =
      batch_norm_call(input, weight, bias, running_mean, running_var, training, eps);
  call.activation = NormActivation::kRelu;
  call.statistics_only = true;
  return call;
}
inline BatchNormCall update_call_of(const Tensor& input, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const Tensor& running_mean,
                                    const Tensor& running_var, double momentum, double eps) {
  BatchNormCall call =
      call_of(input, weight, bias, running_mean, running_var, /*training=*/true, eps);
  call.update = true;
  call.momentum = momentum;
  return call;
}

}  // namespace warpwright::batch_norm_pool
