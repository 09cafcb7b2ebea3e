// batch_norm_relu_max_pool2d, its form that moves the running statistics, and their backward, on
// every dispatch key. The backward, where it is to be differentiated, is max_pool2d's (the codes
// hold the relu's gate) and then batch norm's.
#include "ops/batch_norm/torch/common.h"
#include "ops/batch_norm_relu_max_pool2d/batch_norm_relu_max_pool2d.h"
#include "ops/max_pool2d/torch/common.h"

namespace warpwright {
namespace {

using Mask3 = std::array<bool, 3>;
// Output, mean, rstd, codes, winners.
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The ops through the dispatcher.
namespace call {

Tensors5 batch_norm_relu_max_pool2d(const Tensor& input, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& running_mean,
                                    const OptionalTensor& running_var, bool training, double eps,
                                    const PoolWindow& w, bool ceil_mode, bool save) {
  static const auto op =
      find_op<Tensors5(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, const OptionalTensor&, bool, double, IntArrayRef,
                       IntArrayRef, IntArrayRef, IntArrayRef, bool, bool)>(
          "warpwright::batch_norm_relu_max_pool2d");
  return op.call(input, weight, bias, running_mean, running_var, training, eps, w.kernel, w.stride,
                 w.padding, w.dilation, ceil_mode, save);
}

Tensors5 batch_norm_relu_max_pool2d_update(const Tensor& input, const OptionalTensor& weight,
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

Tensors3 batch_norm_relu_max_pool2d_backward(const Tensor& grad_output, const Tensor& input,
                                             const Tensor& codes, const Tensor& winners,
                                             const OptionalTensor& weight,
                                             const OptionalTensor& bias, const Tensor& mean,
                                             const Tensor& rstd, bool training, const PoolWindow& w,
                                             Mask3 output_mask) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                       bool, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, Mask3)>(
          "warpwright::batch_norm_relu_max_pool2d_backward");
  return op.call(grad_output, input, codes, winners, weight, bias, mean, rstd, training, w.kernel,
                 w.stride, w.padding, w.dilation, output_mask);
}

}  // namespace call

// ---- checks ----

void check_images(const Tensor& input) {
  check_input(input);
  TORCH_CHECK(input.dim() == 4, "batch_norm_relu_max_pool2d: expected 4D input (got ", input.dim(),
              "D input)");
}

// A window without any tap inside the image has no element to keep; dilation makes such windows in
// the left and upper padding of small images.
template <class Extent>
void check_taps(const Extent& extent, const PoolWindow& w, int axis) {
  if (w.dilation[axis] == 1) return;  // the padding is at most half of the window
  for (int64_t begin = -w.padding[axis]; begin < 0; begin += w.stride[axis]) {
    const int64_t first = ceil_div(-begin, w.dilation[axis]) * w.dilation[axis] + begin;
    TORCH_CHECK(first == 0 || extent > first,
                "batch_norm_relu_max_pool2d: a window has no tap inside the image: kernel_size=",
                w.kernel[axis], ", padding=", w.padding[axis], ", dilation=", w.dilation[axis],
                ", extent ", extent);
  }
}

template <class Extent>
PoolSizes<Extent> checked_sizes(const Tensor& input, c10::ArrayRef<Extent> sizes,
                                const PoolWindow& w, bool ceil_mode) {
  check_images(input);
  const PoolSizes<Extent> result = pooled_sizes(input, sizes, w, ceil_mode);
  for (int axis : {0, 1}) check_taps(sizes[2 + axis], w, axis);
  return result;
}

bool walks_channels_last(const Tensor& input) {
  return output_format(input) == at::MemoryFormat::ChannelsLast;
}

void check_saved(const Tensor& grad_output, const Tensor& input, const Tensor& codes,
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

// ---- CPU and CUDA ----

BatchNormCall call_of(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var,
                      bool training, double eps) {
  BatchNormCall call =
      batch_norm_call(input, weight, bias, running_mean, running_var, training, eps);
  call.relu = true;
  call.statistics_only = true;
  return call;
}
BatchNormCall update_call_of(const Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const Tensor& running_mean,
                             const Tensor& running_var, double momentum, double eps) {
  BatchNormCall call =
      call_of(input, weight, bias, running_mean, running_var, /*training=*/true, eps);
  call.update = true;
  call.momentum = momentum;
  return call;
}

// `statistics(BatchNormParams)`, then `pool(BatchNormPoolParams)`.
template <class Statistics, class Pool>
Tensors5 pooled_forward_with(const BatchNormCall& call, const PoolWindow& w, bool ceil_mode,
                             bool save, Statistics&& statistics, Pool&& pool) {
  const Tensor& input = call.input;
  const auto sizes = checked_sizes(input, input.sizes(), w, ceil_mode);
  check_has_storage(input, "batch_norm_relu_max_pool2d: input");
  check_has_storage(call.weight, "batch_norm_relu_max_pool2d: weight");
  check_has_storage(call.bias, "batch_norm_relu_max_pool2d: bias");
  check_has_storage(call.running_mean, "batch_norm_relu_max_pool2d: running_mean");
  check_has_storage(call.running_var, "batch_norm_relu_max_pool2d: running_var");
  const bool channels_last = walks_channels_last(input);
  const auto format = pool_format(channels_last);
  Tensor output = at::empty(sizes, input.options(), format), codes, winners;
  auto saved = [&](at::ScalarType type) {
    const auto options = input.options().dtype(type);
    return save ? at::empty(sizes, options, format) : at::empty({0}, options);
  };
  codes = saved(pool_code_type(w));
  winners = saved(input.scalar_type());
  const int64_t channels = input.size(1);
  const Tensor table =
      at::empty({kForwardCoefficients, channels}, input.options().dtype(stats_type(input)));
  auto [none, mean, rstd, no_mask] = forward_with(call, [&](BatchNormParams& p) {
    p.coefficients = table.mutable_data_ptr();
    statistics(p);
    pool(BatchNormPoolParams{
        .pool = {.dtype = p.dtype,
                 .geometry = code_geometry("batch_norm_relu_max_pool2d", input.sizes(), sizes, w,
                                           channels_last),
                 .relu = true,
                 .input = p.input,
                 .output = output.mutable_data_ptr(),
                 .codes = save ? codes.mutable_data_ptr() : nullptr},
        .normalization = {table.const_data_ptr(), channels},
        .winners = save ? winners.mutable_data_ptr() : nullptr,
    });
  });
  return {output, mean, rstd, codes, winners};
}

struct BackwardCall {
  const Tensor &grad_output, &input, &codes, &winners;
  const OptionalTensor &weight, &bias;
  const Tensor &mean, &rstd;
  bool training;
  PoolWindow window;
  Mask3 output_mask;
};

// `sums(BatchNormBackwardParams)`, then `pool(BatchNormPoolBackwardParams)`.
template <class Sums, class Pool>
Tensors3 pooled_backward_with(const BackwardCall& call, Sums&& sums, Pool&& pool) {
  const Tensor& input = call.input;
  const Tensor bias = value_or_undefined(call.bias);
  check_saved(call.grad_output, input, call.codes, call.winners, bias, call.window);
  check_same_device(call.mean, input, "batch_norm_relu_max_pool2d_backward: mean");
  check_same_device(call.rstd, input, "batch_norm_relu_max_pool2d_backward: rstd");
  if (call.winners.numel() > 0) {
    check_has_storage(call.grad_output, "batch_norm_relu_max_pool2d_backward: grad_output");
    check_has_storage(call.winners, "batch_norm_relu_max_pool2d_backward: winners");
    check_has_storage(call.codes, "batch_norm_relu_max_pool2d_backward: codes");
    check_has_storage(input, "batch_norm_relu_max_pool2d_backward: input");
    check_has_storage(call.mean, "batch_norm_relu_max_pool2d_backward: mean");
    check_has_storage(call.rstd, "batch_norm_relu_max_pool2d_backward: rstd");
    check_has_storage(value_or_undefined(call.weight),
                      "batch_norm_relu_max_pool2d_backward: weight");
    check_has_storage(bias, "batch_norm_relu_max_pool2d_backward: bias");
  }
  const bool channels_last = walks_channels_last(input);
  const auto format = pool_format(channels_last);
  const Tensor grad = call.grad_output.contiguous(format);
  const Tensor winners = call.winners.contiguous(format);
  const int64_t channels = input.size(1);
  const bool wants_input = call.output_mask[0];
  const Tensor table = at::empty({kBackwardCoefficients, channels}, call.mean.options());
  auto [none, grad_weight, grad_bias, no_residual] = backward_with(
      BatchNormBackwardCall{
          .grad_output = grad,
          .input = winners,
          .weight = value_or_undefined(call.weight),
          .mean = call.mean,
          .rstd = call.rstd,
          .training = call.training,
          .output_mask = {false, call.output_mask[1], call.output_mask[2], false},
          .relu = true,
          .bias = bias,
          .count = input.numel() / std::max<int64_t>(channels, 1),
          .coefficients = wants_input ? table.mutable_data_ptr() : nullptr,
      },
      sums);
  if (!wants_input) return {Tensor(), grad_weight, grad_bias};
  Tensor grad_input = at::empty(input.sizes(), input.options(), input.suggest_memory_format());
  if (input.numel() > 0) {
    const Tensor x = dense(input, format, /*aligned=*/false);
    const Tensor codes = call.codes.contiguous(format);
    pool(BatchNormPoolBackwardParams{
        .pool = {.dtype = dtype_of(input),
                 .geometry = code_geometry("batch_norm_relu_max_pool2d_backward", input.sizes(),
                                           codes.sizes(), call.window, channels_last),
                 .grad_output = grad.const_data_ptr(),
                 .codes = codes.const_data_ptr(),
                 .grad_input = grad_input.mutable_data_ptr()},
        .gradient = {table.const_data_ptr(), channels},
        .training = call.training,
        .input = x.const_data_ptr(),
    });
  }
  return {grad_input, grad_weight, grad_bias};
}

Tensors5 pooled_forward_cpu(const BatchNormCall& call, const PoolWindow& w, bool ceil_mode,
                            bool save) {
  return pooled_forward_with(call, w, ceil_mode, save, batch_norm_cpu, batch_norm_pool_cpu);
}
Tensors3 pooled_backward_cpu(const BackwardCall& call) {
  return pooled_backward_with(call, batch_norm_backward_cpu, batch_norm_pool_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensors5 pooled_forward_cuda(const BatchNormCall& call, const PoolWindow& w, bool ceil_mode,
                             bool save) {
  const CudaCall cuda(call.input);
  return pooled_forward_with(
      call, w, ceil_mode, save,
      [&](BatchNormParams& p) { run_forward_cuda(p, call.input, cuda.stream); },
      [&](const BatchNormPoolParams& p) {
        launch_batch_norm_pool(p, choose_batch_norm_pool(p), cuda.stream);
      });
}
Tensors3 pooled_backward_cuda(const BackwardCall& call) {
  const CudaCall cuda(call.input);
  return pooled_backward_with(
      call, [&](BatchNormBackwardParams& p) { run_backward_cuda(p, call.input, cuda.stream); },
      [&](const BatchNormPoolBackwardParams& p) {
        launch_batch_norm_pool_backward(p, choose_batch_norm_pool_backward(p), cuda.stream);
      });
}
#endif

// The registered forms; kRun and kRunBackward are a device's.
template <auto kRun>
Tensors5 forward_kernel(const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& running_mean,
                        const OptionalTensor& running_var, bool training, double eps,
                        IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                        IntArrayRef dilation, bool ceil_mode, bool save) {
  return kRun(call_of(input, weight, bias, running_mean, running_var, training, eps),
              make_pool_window(kernel_size, stride, padding, dilation), ceil_mode, save);
}
template <auto kRun>
Tensors5 update_kernel(const Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias, Tensor running_mean, Tensor running_var,
                       double momentum, double eps, IntArrayRef kernel_size, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, bool save) {
  return kRun(update_call_of(input, weight, bias, running_mean, running_var, momentum, eps),
              make_pool_window(kernel_size, stride, padding, dilation), ceil_mode, save);
}
template <auto kRunBackward>
Tensors3 backward_kernel(const Tensor& grad_output, const Tensor& input, const Tensor& codes,
                         const Tensor& winners, const OptionalTensor& weight,
                         const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd,
                         bool training, IntArrayRef kernel_size, IntArrayRef stride,
                         IntArrayRef padding, IntArrayRef dilation, Mask3 output_mask) {
  return kRunBackward(
      BackwardCall{grad_output, input, codes, winners, weight, bias, mean, rstd, training,
                   make_pool_window(kernel_size, stride, padding, dilation), output_mask});
}

// ---- Meta ----

Tensors5 pooled_forward_meta(const BatchNormCall& call, const PoolWindow& w, bool ceil_mode,
                             bool save) {
  const Tensor& input = call.input;
  const auto sizes = checked_sizes(input, input.sym_sizes(), w, ceil_mode);
  check_forward(input, call.weight, call.bias, call.running_mean, call.running_var, call.training);
  const auto format = pool_format(walks_channels_last(input));
  const auto stats = input.options().dtype(stats_type(input));
  auto saved = [&](at::ScalarType type) {
    const auto options = input.options().dtype(type);
    return save ? at::empty_symint(sizes, options, format) : at::empty({0}, options);
  };
  return {at::empty_symint(sizes, input.options(), format),
          at::empty_symint({channels_of(input)}, stats),
          at::empty_symint({channels_of(input)}, stats), saved(pool_code_type(w)),
          saved(input.scalar_type())};
}
Tensors3 pooled_backward_meta(const BackwardCall& call) {
  const Tensor weight = value_or_undefined(call.weight);
  check_saved(call.grad_output, call.input, call.codes, call.winners, value_or_undefined(call.bias),
              call.window);
  check_backward(call.grad_output, call.winners, weight, call.mean, call.rstd);
  const auto& wanted = call.output_mask;
  auto [dx, dw, db, none] =
      backward_meta(call.input, weight, call.mean, {wanted[0], wanted[1], wanted[2], false});
  return {dx, dw, db};
}

// ---- Autograd ----

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
  if (any_tangent(c.input, c.weight, c.bias)) {
    direction = tangent(std::get<0>(call_batch_norm(
        c.input, optional_if_defined(c.weight), optional_if_defined(c.bias),
        c.training ? std::nullopt : optional_if_defined(c.running_mean),
        c.training ? std::nullopt : optional_if_defined(c.running_var), c.training, c.eps)));
  }
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
  for (const Tensor* stat : {&running_mean, &running_var}) {
    if (!stat->is_inference()) torch::autograd::impl::bump_version(*stat);
  }
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

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "batch_norm_relu_max_pool2d(Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor? running_mean, Tensor? running_var, bool training, float eps, int[2] kernel_size, "
      "int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, bool save=False) "
      "-> (Tensor output, Tensor mean, Tensor rstd, Tensor codes, Tensor winners)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_relu_max_pool2d_update(Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor(a!) running_mean, Tensor(b!) running_var, float momentum, float eps, "
      "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, "
      "bool save=False) "
      "-> (Tensor output, Tensor mean, Tensor rstd, Tensor codes, Tensor winners)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_relu_max_pool2d_backward(Tensor grad_output, Tensor input, Tensor codes, "
      "Tensor winners, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool training, "
      "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("batch_norm_relu_max_pool2d", forward_kernel<pooled_forward_cpu>);
  m.impl("batch_norm_relu_max_pool2d_update", update_kernel<pooled_forward_cpu>);
  m.impl("batch_norm_relu_max_pool2d_backward", backward_kernel<pooled_backward_cpu>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("batch_norm_relu_max_pool2d", forward_kernel<pooled_forward_cuda>);
  m.impl("batch_norm_relu_max_pool2d_update", update_kernel<pooled_forward_cuda>);
  m.impl("batch_norm_relu_max_pool2d_backward", backward_kernel<pooled_backward_cuda>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("batch_norm_relu_max_pool2d", forward_kernel<pooled_forward_meta>);
  m.impl("batch_norm_relu_max_pool2d_update", update_kernel<pooled_forward_meta>);
  m.impl("batch_norm_relu_max_pool2d_backward", backward_kernel<pooled_backward_meta>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("batch_norm_relu_max_pool2d", batch_norm_relu_max_pool2d_autograd);
  m.impl("batch_norm_relu_max_pool2d_update", batch_norm_relu_max_pool2d_update_autograd);
  m.impl("batch_norm_relu_max_pool2d_backward", batch_norm_relu_max_pool2d_backward_autograd);
}

}  // namespace warpwright
