// Autograd and Autocast of conv2d_batch_norm_relu_max_pool2d and its backward. A backward that is
// to be differentiated runs as one op after the other.
#include <ATen/autocast_mode.h>

#include "ops/conv2d_batch_norm_relu_max_pool2d/torch/common.h"
#include "torch/weight_copies.h"

namespace warpwright {
namespace {

using namespace conv_norm_pool;

// ---- Autograd ----

// saved: input, weight, bias, norm_weight, mean, rstd, codes, moments.
struct Conv2dBatchNormReluMaxPool2dBackward {
  static constexpr const char* kName = "WarpwrightConv2DBatchNormReluMaxPool2DBackward";
  static constexpr bool kPiecewiseLinear = true;
  struct Attributes {
    Conv2dGeometry geometry;
    PoolWindow window;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db, d_norm_weight, d_norm_bias] =
        dispatch(BackwardCall{.grad_output = grads[0],
                              .input = saved[0],
                              .weight = saved[1],
                              .bias = saved[2],
                              .norm_weight = saved[3],
                              .mean = saved[4],
                              .rstd = saved[5],
                              .codes = saved[6],
                              .moments = saved[7],
                              .geometry = a.geometry,
                              .window = a.window,
                              .output_mask = {needs[0], needs[1], needs[2], needs[3], needs[4]}});
    return {dx, dw, db, d_norm_weight, d_norm_bias};
  }
};

Tensors5 forward_autograd(Call c) {
  check_no_gradient(c.running_mean, "conv2d_batch_norm_relu_max_pool2d", "running_mean");
  check_no_gradient(c.running_var, "conv2d_batch_norm_relu_max_pool2d", "running_var");
  auto node = make_node<Conv2dBatchNormReluMaxPool2dBackward>(
      {c.geometry, c.window}, c.input, c.weight, c.bias, c.norm_weight, c.norm_bias);
  Tensor dual;
  if (any_tangent(c.input, c.weight, c.bias, c.norm_weight, c.norm_bias)) {
    Call without_statistics = c;
    without_statistics.running_mean = without_statistics.running_var = Tensor();
    dual = std::get<0>(composed(without_statistics));
  }
  c.save = c.save || node;
  auto results = below_autograd([&] { return dispatch(c); });
  const auto& [output, mean, rstd, codes, moments] = results;
  if (node) {
    for (const Tensor& tensor :
         {c.input, c.weight, c.bias, c.norm_weight, mean, rstd, codes, moments}) {
      node->save(tensor);
    }
    set_history(output, node);
  }
  if (has_tangent(dual)) set_tangent(output, tangent(dual));
  return results;
}

Tensors5 conv2d_batch_norm_relu_max_pool2d_autograd(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
    SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
    IntArrayRef pool_kernel, IntArrayRef pool_stride, IntArrayRef pool_padding,
    IntArrayRef pool_dilation, bool ceil_mode, bool save) {
  return forward_autograd(call_of(input, weight, bias, norm_weight, norm_bias, eps, stride, padding,
                                  dilation, std::move(groups), pool_kernel, pool_stride,
                                  pool_padding, pool_dilation, ceil_mode, save));
}

Tensors5 conv2d_batch_norm_relu_max_pool2d_update_autograd(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, Tensor running_mean,
    Tensor running_var, double momentum, double eps, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, SymInt groups, IntArrayRef pool_kernel, IntArrayRef pool_stride,
    IntArrayRef pool_padding, IntArrayRef pool_dilation, bool ceil_mode, bool save) {
  auto results = forward_autograd(
      update_call_of(input, weight, bias, norm_weight, norm_bias, running_mean, running_var,
                     momentum, eps, stride, padding, dilation, std::move(groups), pool_kernel,
                     pool_stride, pool_padding, pool_dilation, ceil_mode, save));
  bump_statistics(running_mean, running_var);
  return results;
}

Tensors5 conv2d_batch_norm_relu_max_pool2d_backward_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& bias, const OptionalTensor& norm_weight, const Tensor& mean,
    const Tensor& rstd, const Tensor& codes, const Tensor& moments, SymIntArrayRef stride,
    SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups, IntArrayRef pool_kernel,
    IntArrayRef pool_stride, IntArrayRef pool_padding, IntArrayRef pool_dilation,
    Mask5 output_mask) {
  constexpr const char* kOp = "conv2d_batch_norm_relu_max_pool2d_backward";
  check_constant(mean, kOp, "mean");
  check_constant(rstd, kOp, "rstd");
  check_constant(moments, kOp, "moments");
  const BackwardCall call =
      backward_call_of(grad_output, input, weight, bias, norm_weight, mean, rstd, codes, moments,
                       stride, padding, dilation, std::move(groups), pool_kernel, pool_stride,
                       pool_padding, pool_dilation, output_mask);
  for (const Tensor& tensor : {grad_output, input, weight, call.bias, call.norm_weight}) {
    if (is_differentiated(tensor)) return composed(call);
  }
  return below_autograd([&] { return dispatch(call); });
}

// ---- Autocast: the convolution's rule. Batch norm and the pool have none. ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
struct Autocast {
  static Tensors5 run(const Call& c) {
    c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
    const Tensor input = at::autocast::cached_cast(type, c.input, kDevice);
    const Tensor weight = cast_weight(type, c.weight, kDevice);
    return dispatch(Call{.input = input,
                         .weight = weight,
                         .bias = cast_weight(type, c.bias, kDevice),
                         .norm_weight = c.norm_weight,
                         .norm_bias = c.norm_bias,
                         .running_mean = c.running_mean,
                         .running_var = c.running_var,
                         .momentum = c.momentum,
                         .eps = c.eps,
                         .geometry = c.geometry,
                         .window = c.window,
                         .ceil_mode = c.ceil_mode,
                         .save = c.save});
  }
  static Tensors5 forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                          double eps, SymIntArrayRef stride, SymIntArrayRef padding,
                          SymIntArrayRef dilation, SymInt groups, IntArrayRef pool_kernel,
                          IntArrayRef pool_stride, IntArrayRef pool_padding,
                          IntArrayRef pool_dilation, bool ceil_mode, bool save) {
    return run(call_of(input, weight, bias, norm_weight, norm_bias, eps, stride, padding, dilation,
                       std::move(groups), pool_kernel, pool_stride, pool_padding, pool_dilation,
                       ceil_mode, save));
  }
  static Tensors5 update(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                         Tensor running_mean, Tensor running_var, double momentum, double eps,
                         SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                         SymInt groups, IntArrayRef pool_kernel, IntArrayRef pool_stride,
                         IntArrayRef pool_padding, IntArrayRef pool_dilation, bool ceil_mode,
                         bool save) {
    return run(update_call_of(input, weight, bias, norm_weight, norm_bias, running_mean,
                              running_var, momentum, eps, stride, padding, dilation,
                              std::move(groups), pool_kernel, pool_stride, pool_padding,
                              pool_dilation, ceil_mode, save));
  }
};
using AutocastCpu = Autocast<at::kCPU, c10::DispatchKey::AutocastCPU>;
using AutocastCuda = Autocast<at::kCUDA, c10::DispatchKey::Autocast>;

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv2d_batch_norm_relu_max_pool2d", conv2d_batch_norm_relu_max_pool2d_autograd);
  m.impl("conv2d_batch_norm_relu_max_pool2d_update",
         conv2d_batch_norm_relu_max_pool2d_update_autograd);
  m.impl("conv2d_batch_norm_relu_max_pool2d_backward",
         conv2d_batch_norm_relu_max_pool2d_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv2d_batch_norm_relu_max_pool2d", TORCH_FN(AutocastCpu::forward));
  m.impl("conv2d_batch_norm_relu_max_pool2d_update", TORCH_FN(AutocastCpu::update));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv2d_batch_norm_relu_max_pool2d", TORCH_FN(AutocastCuda::forward));
  m.impl("conv2d_batch_norm_relu_max_pool2d_update", TORCH_FN(AutocastCuda::update));
}

}  // namespace warpwright
