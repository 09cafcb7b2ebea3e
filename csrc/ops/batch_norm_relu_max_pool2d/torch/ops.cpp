// batch_norm_relu_max_pool2d, its form that moves the running statistics, and their backward, from
// tensors to the kernels: checks, CPU, CUDA and Meta. autograd.cpp has Autograd.
#include "ops/batch_norm_relu_max_pool2d/torch/common.h"

namespace warpwright {
namespace {

using namespace batch_norm_pool;

// ---- checks ----

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

// ---- CPU and CUDA ----

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
          .activation = NormActivation::kRelu,
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

}  // namespace warpwright
