// Autograd of batch_norm_relu_max_pool2d and its backward. A backward that is to be differentiated
// runs as max_pool2d's, whose codes hold the relu's gate, followed by batch norm's.
#include "ops/batch_norm_relu_max_pool2d/torch/common.h"

namespace warpwright {
namespace {

using namespace batch_norm_pool;

struct BatchNormReluMaxPool2dBackward {  // saved: input, codes, winners, weight, bias, mean, rstd
  static constexpr const char* kName = "WarpwrightBatchNormReluMaxPool2DBackward";
  static constexpr bool kPiecewiseLinear = true;
  struct Attributes {
    PoolWindow window;
    bool training;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] = call::batch_norm_relu_max_pool2d_backward(
        grads[0], saved[0], saved[1], saved[2], optional_if_defined(saved[3]),
        optional_if_defined(saved[4]), saved[5], saved[6], a.training, a.window,
        {needs[0], needs[1], needs[2]});
    return {dx, dw, db};
  }
};

// `forward(save)` runs the op below autograd.
template <class Forward>
Tensors5 forward_autograd(const BatchNormCall& c, const PoolWindow& w, bool save,
                          Forward&& forward) {
  check_running_statistics(c.running_mean, c.running_var, c.training);
  check_images(c.input);
  auto node = make_node<BatchNormReluMaxPool2dBackward>({w, c.training}, c.input, c.weight, c.bias);
  // Before a training step moves the running statistics.
  Tensor direction;
  if (any_tangent(c.input, c.weight, c.bias)) direction = tangent(without_activation(c));
  auto results = below_autograd([&] { return forward(save || node || direction.defined()); });
  const auto& [output, mean, rstd, codes, winners] = results;
  if (node) {
    for (const Tensor* tensor : {&c.input, &codes, &winners, &c.weight, &c.bias, &mean, &rstd}) {
      node->save(*tensor);
    }
    set_history(output, node);
  }
  if (direction.defined()) {
    const Tensor passed = call_max_pool2d_gather(direction, codes, w, walks_channels_last(c.input));
    set_tangent(output, tangent_with_zero_terms(passed, c.input, c.weight, c.bias));
  }
  return results;
}

Tensors5 batch_norm_relu_max_pool2d_autograd(const Tensor& input, const OptionalTensor& weight,
                                             const OptionalTensor& bias,
                                             const OptionalTensor& running_mean,
                                             const OptionalTensor& running_var, bool training,
                                             double eps, IntArrayRef kernel_size,
                                             IntArrayRef stride, IntArrayRef padding,
                                             IntArrayRef dilation, bool ceil_mode, bool save) {
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  return forward_autograd(call_of(input, weight, bias, running_mean, running_var, training, eps), w,
                          save, [&](bool keep) {
                            return call::batch_norm_relu_max_pool2d(
                                input, weight, bias, running_mean, running_var, training, eps, w,
                                ceil_mode, keep);
                          });
}

Tensors5 batch_norm_relu_max_pool2d_update_autograd(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    Tensor running_mean, Tensor running_var, double momentum, double eps, IntArrayRef kernel_size,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, bool save) {
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  auto results = forward_autograd(
      update_call_of(input, weight, bias, running_mean, running_var, momentum, eps), w, save,
      [&](bool keep) {
        return call::batch_norm_relu_max_pool2d_update(
            input, weight, bias, running_mean, running_var, momentum, eps, w, ceil_mode, keep);
      });
  bump_statistics(running_mean, running_var);
  return results;
}

Tensors3 batch_norm_relu_max_pool2d_backward_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& codes, const Tensor& winners,
    const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
    const Tensor& rstd, bool training, IntArrayRef kernel_size, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, Mask3 output_mask) {
  constexpr const char* kOp = "batch_norm_relu_max_pool2d_backward";
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  check_constant(mean, kOp, "mean");
  check_constant(rstd, kOp, "rstd");
  check_constant(winners, kOp, "winners");
  const Tensor weight_value = value_or_undefined(weight);
  if (!is_differentiated(grad_output) && !is_differentiated(input) &&
      !is_differentiated(weight_value)) {
    return below_autograd([&] {
      return call::batch_norm_relu_max_pool2d_backward(grad_output, input, codes, winners, weight,
                                                       bias, mean, rstd, training, w, output_mask);
    });
  }
  // To be differentiated: one after the other.
  check_saved(grad_output, input, codes, winners, value_or_undefined(bias), w);
  const Tensor dy = call_max_pool2d_backward(grad_output, codes, input.sym_sizes(), w,
                                             walks_channels_last(input));
  return call_batch_norm_backward(dy, input, weight, mean, rstd, training, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("batch_norm_relu_max_pool2d", batch_norm_relu_max_pool2d_autograd);
  m.impl("batch_norm_relu_max_pool2d_update", batch_norm_relu_max_pool2d_update_autograd);
  m.impl("batch_norm_relu_max_pool2d_backward", batch_norm_relu_max_pool2d_backward_autograd);
}

}  // namespace warpwright
