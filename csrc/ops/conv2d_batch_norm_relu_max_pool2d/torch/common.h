// Shared by the files of torch/: the arguments of a call, the ops through the dispatcher, and both
// directions as one op after the other.
#pragma once

#include "ops/batch_norm_relu_max_pool2d/torch/common.h"
#include "ops/conv2d/torch/common.h"
#include "ops/conv2d_batch_norm_relu_max_pool2d/conv2d_batch_norm_relu_max_pool2d.h"

namespace warpwright::conv_norm_pool {

// The forward: output, mean, rstd, codes, moments. The backward: the gradients of input, weight,
// bias, norm_weight and norm_bias.
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Mask5 = std::array<bool, 5>;  // input, weight, bias, norm_weight, norm_bias

struct Call {
  const Tensor &input, &weight;
  Tensor bias, norm_weight, norm_bias;
  Tensor running_mean, running_var;  // both, if the call updates them
  double momentum, eps;
  Conv2dGeometry geometry;
  PoolWindow window;
  bool ceil_mode, save;

  bool updates() const { return running_mean.defined(); }
};

inline Call call_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
                    SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                    SymInt groups, IntArrayRef pool_kernel, IntArrayRef pool_stride,
                    IntArrayRef pool_padding, IntArrayRef pool_dilation, bool ceil_mode,
                    bool save) {
  return {.input = input,
          .weight = weight,
          .bias = value_or_undefined(bias),
          .norm_weight = value_or_undefined(norm_weight),
          .norm_bias = value_or_undefined(norm_bias),
          .running_mean = {},
          .running_var = {},
          .momentum = 0,
          .eps = eps,
          .geometry = geometry_of(stride, padding, dilation, std::move(groups)),
          .window = make_pool_window(pool_kernel, pool_stride, pool_padding, pool_dilation),
          .ceil_mode = ceil_mode,
          .save = save};
}

inline Call update_call_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                           const Tensor& running_mean, const Tensor& running_var, double momentum,
                           double eps, SymIntArrayRef stride, SymIntArrayRef padding,
                           SymIntArrayRef dilation, SymInt groups, IntArrayRef pool_kernel,
                           IntArrayRef pool_stride, IntArrayRef pool_padding,
                           IntArrayRef pool_dilation, bool ceil_mode, bool save) {
  Call call = call_of(input, weight, bias, norm_weight, norm_bias, eps, stride, padding, dilation,
                      std::move(groups), pool_kernel, pool_stride, pool_padding, pool_dilation,
                      ceil_mode, save);
  call.running_mean = running_mean;
  call.running_var = running_var;
  call.momentum = momentum;
  return call;
}

struct BackwardCall {
  const Tensor &grad_output, &input, &weight;
  Tensor bias, norm_weight;
  const Tensor &mean, &rstd, &codes, &moments;
  Conv2dGeometry geometry;
  PoolWindow window;
  Mask5 output_mask;
};

inline BackwardCall backward_call_of(const Tensor& grad_output, const Tensor& input,
                                     const Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& norm_weight, const Tensor& mean,
                                     const Tensor& rstd, const Tensor& codes, const Tensor& moments,
                                     SymIntArrayRef stride, SymIntArrayRef padding,
                                     SymIntArrayRef dilation, SymInt groups,
                                     IntArrayRef pool_kernel, IntArrayRef pool_stride,
                                     IntArrayRef pool_padding, IntArrayRef pool_dilation,
                                     Mask5 output_mask) {
  return {.grad_output = grad_output,
          .input = input,
          .weight = weight,
          .bias = value_or_undefined(bias),
          .norm_weight = value_or_undefined(norm_weight),
          .mean = mean,
          .rstd = rstd,
          .codes = codes,
          .moments = moments,
          .geometry = geometry_of(stride, padding, dilation, std::move(groups)),
          .window = make_pool_window(pool_kernel, pool_stride, pool_padding, pool_dilation),
          .output_mask = output_mask};
}

// ---- the ops through the dispatcher ----

inline Tensors5 dispatch(const Call& c) {
  const Conv2dGeometry& g = c.geometry;
  const PoolWindow& w = c.window;
  if (c.updates()) {
    static const auto op = find_op<Tensors5(
        const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, Tensor, Tensor, double, double, SymIntArrayRef, SymIntArrayRef,
        SymIntArrayRef, SymInt, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool)>(
        "warpwright::conv2d_batch_norm_relu_max_pool2d_update");
    return op.call(c.input, c.weight, optional_if_defined(c.bias),
                   optional_if_defined(c.norm_weight), optional_if_defined(c.norm_bias),
                   c.running_mean, c.running_var, c.momentum, c.eps, g.stride, g.padding,
                   g.dilation, g.groups, w.kernel, w.stride, w.padding, w.dilation, c.ceil_mode,
                   c.save);
  }
  static const auto op =
      find_op<Tensors5(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, double, SymIntArrayRef, SymIntArrayRef,
                       SymIntArrayRef, SymInt, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                       bool, bool)>("warpwright::conv2d_batch_norm_relu_max_pool2d");
  return op.call(c.input, c.weight, optional_if_defined(c.bias), optional_if_defined(c.norm_weight),
                 optional_if_defined(c.norm_bias), c.eps, g.stride, g.padding, g.dilation, g.groups,
                 w.kernel, w.stride, w.padding, w.dilation, c.ceil_mode, c.save);
}

inline Tensors5 dispatch(const BackwardCall& b) {
  static const auto op = find_op<Tensors5(
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef, SymIntArrayRef,
      SymIntArrayRef, SymInt, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, Mask5)>(
      "warpwright::conv2d_batch_norm_relu_max_pool2d_backward");
  const Conv2dGeometry& g = b.geometry;
  const PoolWindow& w = b.window;
  return op.call(b.grad_output, b.input, b.weight, optional_if_defined(b.bias),
                 optional_if_defined(b.norm_weight), b.mean, b.rstd, b.codes, b.moments, g.stride,
                 g.padding, g.dilation, g.groups, w.kernel, w.stride, w.padding, w.dilation,
                 b.output_mask);
}

// ---- one op after the other ----

// How many moments of the windows a call keeps: none if the CUDA kernels do not take its windows.
// The meta function must say the same, so the image's extents do not count, nor does the device.
// Without the kernels the moments are zeros, which no backward reads.
inline int64_t kept_moments(const Call& c) {
  if (!c.save || c.input.scalar_type() != at::kFloat) return 0;
  const auto known = [](const SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  const Conv2dGeometry& g = c.geometry;
  const auto v = expand_windows<SymInt>(g.stride, g.padding, g.dilation, g.groups);
  const auto filter = [&](int64_t dim) { return known(c.weight.sym_size(dim)); };
  const auto& [kernel, stride, padding, dilation] = c.window;
  const Conv2dShape conv{.dtype = DType::kFloat32,
                         .c = filter(1),
                         .k = filter(0),
                         .r = filter(2),
                         .s = filter(3),
                         .stride_h = known(v.stride[0]),
                         .stride_w = known(v.stride[1]),
                         .dilation_h = known(v.dilation[0]),
                         .dilation_w = known(v.dilation[1]),
                         .groups = known(v.groups)};
  const MaxPool2dGeometry pool{.kernel_h = kernel[0],
                               .kernel_w = kernel[1],
                               .stride_h = stride[0],
                               .stride_w = stride[1],
                               .pad_h = padding[0],
                               .pad_w = padding[1],
                               .dilation_h = dilation[0],
                               .dilation_w = dilation[1]};
  return why_not_windows(conv, pool) == nullptr ? window_sums(conv.c * conv.taps()) : 0;
}

inline Tensors5 composed(const Call& c) {
  const Tensor convolved = call::conv2d(c.input, c.weight, c.bias, c.geometry);
  const auto weight = optional_if_defined(c.norm_weight), bias = optional_if_defined(c.norm_bias);
  auto [output, mean, rstd, codes, winners] =
      c.updates() ? batch_norm_pool::call::batch_norm_relu_max_pool2d_update(
                        convolved, weight, bias, c.running_mean, c.running_var, c.momentum, c.eps,
                        c.window, c.ceil_mode, c.save)
                  : batch_norm_pool::call::batch_norm_relu_max_pool2d(
                        convolved, weight, bias, std::nullopt, std::nullopt, /*training=*/true,
                        c.eps, c.window, c.ceil_mode, c.save);
  return {output, mean, rstd, codes,
          at::zeros({kept_moments(c)}, at::device(c.input.device()).dtype(at::kDouble))};
}

// The convolution again, then the backward of each op. The codes hold the relu's gate.
inline Tensors5 composed(const BackwardCall& b) {
  const auto& wanted = b.output_mask;
  const bool through_conv = wanted[0] || wanted[1] || wanted[2];
  const Tensor convolved = call::conv2d(b.input, b.weight, b.bias, b.geometry);
  check_pool_codes("conv2d_batch_norm_relu_max_pool2d_backward", b.codes, convolved.sym_sizes(),
                   b.window);
  check_pooled_shape("conv2d_batch_norm_relu_max_pool2d_backward", "grad_output", b.grad_output,
                     b.codes);
  const Tensor dz =
      call_max_pool2d_backward(b.grad_output, b.codes, convolved.sym_sizes(), b.window,
                               batch_norm_pool::walks_channels_last(convolved));
  const auto [d_convolved, d_norm_weight, d_norm_bias] =
      call_batch_norm_backward(dz, convolved, optional_if_defined(b.norm_weight), b.mean, b.rstd,
                               /*training=*/true, {through_conv, wanted[3], wanted[4]});
  Tensor dx, dw, db;
  if (through_conv) {
    std::tie(dx, dw, db) = call::conv2d_backward(d_convolved, b.input, b.weight, b.geometry,
                                                 {wanted[0], wanted[1], wanted[2]});
  }
  return {dx, dw, db, d_norm_weight, d_norm_bias};
}

}  // namespace warpwright::conv_norm_pool
