// Shared by the files of torch/ (batch norm, alone and with an activation): checks, layout, and a
// call from tensors to the kernels' parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <tuple>
#include <utility>

#include "ops/batch_norm/batch_norm.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Mask3 = std::array<bool, 3>;  // input, weight, bias

inline Tensors3 without_last(Tensors4&& results) {
  auto& [first, second, third, last] = results;
  return {std::move(first), std::move(second), std::move(third)};
}

inline c10::SymInt channels_of(const Tensor& input) {
  return input.dim() >= 2 ? input.sym_size(1) : c10::SymInt(0);
}

// Contiguous if the tensor is both, as in native's output.
inline at::MemoryFormat output_format(const Tensor& input) {
  return input.is_contiguous() ? at::MemoryFormat::Contiguous : input.suggest_memory_format();
}

inline at::ScalarType stats_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_input(const Tensor& input) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()),
                              "\"batch_norm\" not implemented for '", input.scalar_type(), "'");
}

// One value per channel, in the input's type, or in float next to a 16-bit input.
inline void check_vector(const Tensor& vector, const char* name, const Tensor& input) {
  if (!vector.defined()) return;
  TORCH_CHECK(vector.sym_numel() == channels_of(input), name, " should contain ",
              channels_of(input), " elements not ", vector.sym_numel());
  TORCH_CHECK(vector.device() == input.device(),
              "batch_norm: Expected all tensors to be on the same device, but input is on ",
              input.device(), " and ", name, " is on ", vector.device());
  const auto type = vector.scalar_type(), input_type = input.scalar_type();
  if (type == input_type) return;
  if (at::isFloatingType(type) && input.sym_numel() == 0) return;  // nothing is read, as in native
  const bool input_is_short = input_type == at::kHalf || input_type == at::kBFloat16;
  const char* device = input.is_cuda() ? "CUDA" : "CPU";
  TORCH_CHECK(type == at::kFloat, "mixed dtype (", device,
              "): expect parameter to have scalar type of Float, but ", name, " has ", type);
  TORCH_CHECK(input_is_short, "mixed dtype (", device,
              "): all inputs must share same datatype, but input has ", input_type, " and ", name,
              " has ", type);
}

inline void check_statistics(const Tensor& vector, const char* name, const Tensor& input) {
  check_vector(vector, name, input);
  TORCH_CHECK(!vector.defined() || vector.dim() == 1 || input.sym_numel() == 0,
              "batch_norm: ", name, ": expected 1 dimension, got ", vector.dim());
}

inline void check_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                          const Tensor& running_mean, const Tensor& running_var, bool training) {
  check_input(input);
  if (!training) {
    TORCH_CHECK(running_mean.defined(), "running_mean must be defined in evaluation mode");
    TORCH_CHECK(running_var.defined(), "running_var must be defined in evaluation mode");
  }
  check_statistics(running_mean, "running_mean", input);
  check_statistics(running_var, "running_var", input);
  check_vector(weight, "weight", input);
  check_vector(bias, "bias", input);
  TORCH_CHECK(input.dim() >= 2 || input.sym_numel() == 0,
              "batch_norm: input: expected at least 2 dimensions, got ", input.dim());
}

inline void check_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           const Tensor& mean, const Tensor& rstd) {
  check_input(input);
  TORCH_CHECK(input.dim() >= 2 || input.sym_numel() == 0,
              "batch_norm_backward: input: expected at least 2 dimensions, got ", input.dim());
  check_argument(grad_output, "batch_norm_backward: grad_output", input.sym_sizes(),
                 input.scalar_type(), input);
  check_vector(weight, "weight", input);
  const c10::SymInt channels[] = {channels_of(input)};
  check_argument(mean, "batch_norm_backward: mean", channels, stats_type(input), input);
  check_argument(rstd, "batch_norm_backward: rstd", channels, stats_type(input), input);
}

inline BatchNormExtents extents_of(const Tensor& input, at::MemoryFormat format) {
  BatchNormExtents e;
  e.batch = input.size(0);
  e.channels = input.size(1);
  e.spatial = input.numel() / std::max<int64_t>(e.batch * e.channels, 1);
  e.rows = e.spatial == 1 || format != at::MemoryFormat::Contiguous;
  return e;
}

// Empty for an undefined tensor. A vector of more than one dimension must be contiguous.
// `name` is "op: argument".
inline ChannelVector channel_vector(const Tensor& tensor, const char* name, bool writable) {
  if (!tensor.defined()) return {};
  if (tensor.dim() > 1) check_contiguous(tensor, name);
  check_has_storage(tensor, name);
  ChannelVector vector;
  vector.data = writable ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  vector.dtype = dtype_of(tensor);
  vector.stride = tensor.dim() == 1 ? tensor.stride(0) : 1;
  return vector;
}

// The output of evaluation depends on the running statistics, that of training does not.
inline void check_running_statistics(const Tensor& running_mean, const Tensor& running_var,
                                     bool training) {
  check_no_gradient(running_mean, "batch_norm", "running_mean");
  check_no_gradient(running_var, "batch_norm", "running_var");
  if (training) return;
  check_no_tangent(running_mean, "batch_norm", "running_mean and running_var");
  check_no_tangent(running_var, "batch_norm", "running_mean and running_var");
}

// After a training step, whose kernel has written them.
inline void bump_statistics(const Tensor& running_mean, const Tensor& running_var) {
  for (const Tensor* stat : {&running_mean, &running_var}) {
    if (!stat->is_inference()) torch::autograd::impl::bump_version(*stat);
  }
}

// ---- batch norm's ops through the dispatcher ----

inline Tensors3 call_batch_norm(const Tensor& input, const OptionalTensor& weight,
                                const OptionalTensor& bias, const OptionalTensor& running_mean,
                                const OptionalTensor& running_var, bool training, double eps) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, const OptionalTensor&, bool, double)>(
          "warpwright::batch_norm");
  return op.call(input, weight, bias, running_mean, running_var, training, eps);
}

inline Tensors3 call_batch_norm_update(const Tensor& input, const OptionalTensor& weight,
                                       const OptionalTensor& bias, Tensor running_mean,
                                       Tensor running_var, double momentum, double eps) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const OptionalTensor&, const OptionalTensor&, Tensor, Tensor,
                       double, double)>("warpwright::batch_norm_update");
  return op.call(input, weight, bias, std::move(running_mean), std::move(running_var), momentum,
                 eps);
}

inline Tensors3 call_batch_norm_backward(const Tensor& grad_output, const Tensor& input,
                                         const OptionalTensor& weight, const Tensor& mean,
                                         const Tensor& rstd, bool training,
                                         std::array<bool, 3> output_mask) {
  static const auto op = find_op<Tensors3(const Tensor&, const Tensor&, const OptionalTensor&,
                                          const Tensor&, const Tensor&, bool, std::array<bool, 3>)>(
      "warpwright::batch_norm_backward");
  return op.call(grad_output, input, weight, mean, rstd, training, output_mask);
}

// ---- the relu's mask ----

// Bytes, also of a call whose sizes are symbols.
template <class Int>
Int mask_bytes(c10::ArrayRef<Int> sizes, at::MemoryFormat format, int64_t element_size) {
  if (sizes.size() < 2) return 0;
  Int spatial = 1;
  for (size_t i = 2; i < sizes.size(); ++i) spatial = spatial * sizes[i];
  const bool rows = format != at::MemoryFormat::Contiguous || spatial == 1;
  return batch_norm_mask_bytes(sizes[0], sizes[1], spatial, rows,
                               static_cast<int>(16 / element_size));
}

// The tensor in the kernels' memory order. Vectors of a mask must start at multiples of 16 bytes.
// If there is a mask, a view that starts elsewhere is copied.
inline Tensor dense(const Tensor& tensor, at::MemoryFormat format, bool aligned) {
  Tensor result = tensor.contiguous(format);
  if (!aligned || reinterpret_cast<uintptr_t>(result.const_data_ptr()) % 16 == 0) return result;
  return result.clone();
}

// ---- calls ----

struct BatchNormCall {
  const Tensor& input;
  Tensor weight, bias, running_mean, running_var;
  bool training, update;
  double momentum, eps;
  NormActivation activation = NormActivation::kNone;
  Tensor residual = {};
  bool statistics_only = false;  // neither an output nor a mask
};

// batch_norm of the same call, with its tangent. Training leaves the running statistics alone.
inline Tensor without_activation(const BatchNormCall& c) {
  auto evaluated = [&](const Tensor& stat) {
    return c.training ? std::nullopt : optional_if_defined(stat);
  };
  return std::get<0>(call_batch_norm(c.input, optional_if_defined(c.weight),
                                     optional_if_defined(c.bias), evaluated(c.running_mean),
                                     evaluated(c.running_var), c.training, c.eps));
}

inline BatchNormCall batch_norm_call(const Tensor& input, const OptionalTensor& weight,
                                     const OptionalTensor& bias, const OptionalTensor& running_mean,
                                     const OptionalTensor& running_var, bool training, double eps) {
  return {.input = input,
          .weight = value_or_undefined(weight),
          .bias = value_or_undefined(bias),
          .running_mean = value_or_undefined(running_mean),
          .running_var = value_or_undefined(running_var),
          .training = training,
          .update = false,
          .momentum = 0,
          .eps = eps};
}
inline BatchNormCall batch_norm_update_call(const Tensor& input, const OptionalTensor& weight,
                                            const OptionalTensor& bias, const Tensor& running_mean,
                                            const Tensor& running_var, double momentum,
                                            double eps) {
  return {.input = input,
          .weight = value_or_undefined(weight),
          .bias = value_or_undefined(bias),
          .running_mean = running_mean,
          .running_var = running_var,
          .training = true,
          .update = true,
          .momentum = momentum,
          .eps = eps};
}

// The output, mean, rstd and, with a relu, its mask (empty without a residual).
template <class Run>
Tensors4 forward_with(const BatchNormCall& call, Run&& run) {
  const Tensor& input = call.input;
  check_forward(input, call.weight, call.bias, call.running_mean, call.running_var, call.training);
  check_has_storage(input, "batch_norm: input");
  check_has_storage(call.residual, "batch_norm_add_relu: residual");
  const auto format = output_format(input);
  const auto options = input.options().dtype(stats_type(input));
  Tensor output, mask;
  if (!call.statistics_only) output = at::empty(input.sizes(), input.options(), format);
  if (call.activation == NormActivation::kRelu && !call.statistics_only) {
    const bool added = call.residual.defined();
    mask = at::empty({added ? mask_bytes(input.sizes(), format, input.element_size()) : 0},
                     input.options().dtype(at::kByte));
  }
  if (input.numel() == 0) {
    const int64_t channels = channels_of(input).expect_int();
    if (mask.defined()) mask.zero_();
    return {output, at::zeros({channels}, options), at::zeros({channels}, options), mask};
  }
  Tensor mean = at::empty({input.size(1)}, options), rstd = at::empty({input.size(1)}, options);
  const bool masked = call.residual.defined();
  const Tensor source = dense(input, format, masked);
  const Tensor residual = masked ? dense(call.residual, format, true) : Tensor();
  BatchNormParams p;
  p.dtype = dtype_of(input);
  p.extents = extents_of(input, format);
  p.input = source.const_data_ptr();
  p.output = call.statistics_only ? nullptr : output.mutable_data_ptr();
  p.activation = call.activation;
  p.residual = masked ? residual.const_data_ptr() : nullptr;
  p.mask = masked ? mask.mutable_data_ptr() : nullptr;
  p.weight = channel_vector(call.weight, "batch_norm: weight", false);
  p.bias = channel_vector(call.bias, "batch_norm: bias", false);
  if (call.update || !call.training) {
    p.running_mean = channel_vector(call.running_mean, "batch_norm: running_mean", call.update);
    p.running_var = channel_vector(call.running_var, "batch_norm: running_var", call.update);
  }
  p.training = call.training;
  p.momentum = call.momentum;
  p.eps = call.eps;
  p.mean = mean.mutable_data_ptr();
  p.rstd = rstd.mutable_data_ptr();
  run(p);
  return {output, mean, rstd, mask};
}

struct BatchNormBackwardCall {
  const Tensor &grad_output, &input;
  Tensor weight;
  const Tensor &mean, &rstd;
  bool training;
  std::array<bool, 4> output_mask;  // input, weight, bias, residual
  NormActivation activation = NormActivation::kNone;
  Tensor bias = {}, mask = {};
  // If input and grad_output are the winners and outputs of a pool: the number of values per
  // statistic, and where to write the coefficients of its input gradient (null: not wanted).
  int64_t count = 0;
  void* coefficients = nullptr;
};

template <class Run>
Tensors4 backward_with(const BatchNormBackwardCall& call, Run&& run) {
  const Tensor& input = call.input;
  check_backward(call.grad_output, input, call.weight, call.mean, call.rstd);
  check_has_storage(call.grad_output, "batch_norm_backward: grad_output");
  check_has_storage(input, "batch_norm_backward: input");
  check_has_storage(call.mean, "batch_norm_backward: mean");
  check_has_storage(call.rstd, "batch_norm_backward: rstd");
  check_has_storage(call.mask, "batch_norm_relu_backward: mask");
  const auto& wanted = call.output_mask;
  const auto format = output_format(input);
  Tensor grad_input, grad_weight, grad_bias, grad_residual;
  auto full = [&] {
    return at::empty(input.sizes(), input.options(), input.suggest_memory_format());
  };
  if (wanted[0]) grad_input = full();
  if (wanted[3]) grad_residual = full();
  // Without a weight no type is given; autograd casts to the bias's.
  const auto options = call.weight.defined() ? call.weight.options() : call.mean.options();
  const int64_t channels = channels_of(input).expect_int();
  const bool empty = input.numel() == 0;
  auto vector = [&] {
    return empty ? at::zeros({channels}, options) : at::empty({channels}, options);
  };
  if (wanted[1]) grad_weight = vector();
  if (wanted[2]) grad_bias = vector();
  if (empty || !(wanted[0] || wanted[1] || wanted[2] || wanted[3] || call.coefficients)) {
    return {grad_input, grad_weight, grad_bias, grad_residual};
  }
  const bool masked = call.mask.defined() && call.mask.numel() > 0;
  const Tensor dy = dense(call.grad_output, format, masked), x = dense(input, format, masked);
  const Tensor means = call.mean.contiguous(), rstds = call.rstd.contiguous();
  const Tensor mask = masked ? call.mask.contiguous() : Tensor();
  BatchNormBackwardParams p;
  p.dtype = dtype_of(input);
  p.extents = extents_of(input, format);
  p.grad_output = dy.const_data_ptr();
  p.input = x.const_data_ptr();
  p.activation = call.activation;
  p.mask = masked ? mask.const_data_ptr() : nullptr;
  p.bias = channel_vector(call.bias, "batch_norm_backward: bias", false);
  p.weight = channel_vector(call.weight, "batch_norm_backward: weight", false);
  p.mean = means.const_data_ptr();
  p.rstd = rstds.const_data_ptr();
  p.training = call.training;
  p.grad_input = wanted[0] ? grad_input.mutable_data_ptr() : nullptr;
  p.grad_residual = wanted[3] ? grad_residual.mutable_data_ptr() : nullptr;
  p.grad_weight = channel_vector(grad_weight, "grad_weight", true);
  p.grad_bias = channel_vector(grad_bias, "grad_bias", true);
  p.count = call.count;
  p.coefficients = call.coefficients;
  run(p);
  return {grad_input, grad_weight, grad_bias, grad_residual};
}

inline Tensors4 forward_cpu(const BatchNormCall& call) {
  return forward_with(call, batch_norm_cpu);
}
inline Tensors4 backward_cpu(const BatchNormBackwardCall& call) {
  return backward_with(call, batch_norm_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
// Runs the kernels of a call on the device of `like`.
inline void run_forward_cuda(const BatchNormParams& p, const Tensor& like, cudaStream_t stream) {
  const BatchNormPlan plan = choose_batch_norm(p, current_device_info());
  const Workspace workspace(plan.workspace_bytes, like);
  launch_batch_norm(p, plan, workspace.data(), stream);
}

inline void run_backward_cuda(const BatchNormBackwardParams& p, const Tensor& like,
                              cudaStream_t stream) {
  const BatchNormPlan plan = choose_batch_norm_backward(p, current_device_info());
  const Workspace workspace(plan.workspace_bytes, like);
  launch_batch_norm_backward(p, plan, workspace.data(), stream);
}

inline Tensors4 forward_cuda(const BatchNormCall& call) {
  const CudaCall cuda(call.input);
  return forward_with(call,
                      [&](BatchNormParams& p) { run_forward_cuda(p, call.input, cuda.stream); });
}

inline Tensors4 backward_cuda(const BatchNormBackwardCall& call) {
  const CudaCall cuda(call.input);
  return backward_with(
      call, [&](BatchNormBackwardParams& p) { run_backward_cuda(p, call.input, cuda.stream); });
}
#endif

// ---- Meta ----

inline Tensors4 forward_meta(const Tensor& input, const Tensor& residual = {}) {
  const auto format = output_format(input);
  const auto options = input.options().dtype(stats_type(input));
  const c10::SymInt bytes =
      residual.defined() ? mask_bytes(input.sym_sizes(), format, input.element_size()) : 0;
  return {at::empty_symint(input.sym_sizes(), input.options(), format),
          at::empty_symint({channels_of(input)}, options),
          at::empty_symint({channels_of(input)}, options),
          at::empty_symint({bytes}, input.options().dtype(at::kByte))};
}

inline Tensors4 backward_meta(const Tensor& input, const Tensor& weight, const Tensor& mean,
                              const std::array<bool, 4>& wanted) {
  const auto options = weight.defined() ? weight.options() : mean.options();
  auto full = [&](bool want) {
    return want
               ? at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format())
               : Tensor();
  };
  auto vector = [&](bool want) {
    return want ? at::empty_symint({channels_of(input)}, options) : Tensor();
  };
  return {full(wanted[0]), vector(wanted[1]), vector(wanted[2]), full(wanted[3])};
}

}  // namespace warpwright
