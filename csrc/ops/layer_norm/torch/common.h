// Shared by the files of torch/: checks, and the step from tensors to the kernels' parameters. Both
// ops use the same code: rms_norm is layer_norm without a mean and a bias.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <tuple>

#include "ops/layer_norm/layer_norm.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

using c10::SymIntArrayRef;
using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;

struct LayerNormCall {
  const Tensor& input;
  SymIntArrayRef shape;  // normalized_shape
  Tensor weight, bias;
  double eps;
  bool centered;
  std::optional<at::ScalarType> dtype = std::nullopt;  // of the output; none: the input's
  Tensor branch = Tensor();                            // defined: `input` is added to it
  Tensor sum = Tensor();                               // of both, dense; the call writes it

  at::ScalarType output_type() const { return dtype.value_or(input.scalar_type()); }
};

struct LayerNormBackwardCall {
  const Tensor &grad_output, &input;
  SymIntArrayRef shape;
  Tensor weight, mean, rstd;
  std::array<bool, 3> wanted;  // input, weight, bias
  bool centered;
  Tensor grad_sum = Tensor();     // defined: added to the gradient of `input`
  Tensor grad_branch = Tensor();  // a copy of that gradient in another type; the call writes it
};

inline at::ScalarType stats_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// native: the epsilon of the type that it computes in.
inline double rms_eps(const std::optional<double>& eps, const Tensor& input) {
  if (eps) return *eps;
  return input.scalar_type() == at::kDouble
             ? std::numeric_limits<double>::epsilon()
             : static_cast<double>(std::numeric_limits<float>::epsilon());
}

// ---- checks, with native's messages ----

inline void check_column_shape(const Tensor& vector, const char* name, SymIntArrayRef shape) {
  TORCH_CHECK(!vector.defined() || vector.sym_sizes() == shape, "Expected ", name,
              " to be of same shape as normalized_shape, but got ", name, " of shape ",
              vector.sym_sizes(), " and normalized_shape = ", shape);
}

inline void check_normalized_shape(const Tensor& input, SymIntArrayRef shape, bool centered) {
  TORCH_CHECK(!shape.empty(),
              "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
              "one element, but got normalized_shape = ",
              shape);
  const int64_t dims = static_cast<int64_t>(shape.size());
  TORCH_CHECK_VALUE(centered || input.dim() >= dims, "Input tensor must have at least ", dims,
                    " dimensions, but got ", input.dim());
  if (input.dim() >= dims &&
      input.sym_sizes().slice(static_cast<size_t>(input.dim() - dims)) == shape) {
    return;
  }
  std::ostringstream message;
  message << "Given normalized_shape=" << shape << ", expected input with shape [*";
  for (const auto& size : shape) message << ", " << size;
  message << "], but got input of size" << input.sym_sizes();
  TORCH_CHECK(false, message.str());
}

// All of one type; layer_norm also takes float32 vectors next to a 16-bit input.
inline void check_vector_types(const LayerNormCall& call) {
  const auto input = call.input.scalar_type();
  for (const Tensor* vector : {&call.weight, &call.bias}) {
    if (!vector->defined() || !call.centered) continue;
    const auto type = vector->scalar_type();
    const bool other = (call.weight.defined() && call.weight.scalar_type() != input) ||
                       (call.bias.defined() && call.bias.scalar_type() != input);
    if (!other) return;
    const char* device = call.input.is_cuda() ? "CUDA" : "CPU";
    const char* name = vector == &call.weight ? "weight" : "bias";
    TORCH_CHECK(type == at::kFloat, "mixed dtype (", device,
                "): expect parameter to have scalar type of Float, but ", name, " has ", type);
    TORCH_CHECK(input == at::kHalf || input == at::kBFloat16, "mixed dtype (", device,
                "): all inputs must share same datatype, but input has ", input, " and ", name,
                " has ", type);
  }
}

inline void check_norm_input(const Tensor& input, bool centered) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()), "\"",
                              centered ? "LayerNormKernelImpl" : "rms_norm",
                              "\" not implemented for '", input.scalar_type(), "'");
}

// Whether a kernel can read or write `type` next to rows of `input`'s type.
inline bool is_type_beside(at::ScalarType type, at::ScalarType input) {
  return type == input || (input == at::kFloat && (type == at::kBFloat16 || type == at::kHalf));
}

// The branch's type in the backward of add_layer_norm or add_rms_norm. A caller's number may be no
// type at all.
inline void check_branch_type(at::ScalarType dtype, const Tensor& sum, bool centered) {
  const auto type = sum.scalar_type();
  TORCH_CHECK(is_type_beside(dtype, type),
              centered ? "add_layer_norm_backward: dtype" : "add_rms_norm_backward: dtype",
              ": expected ", type, type == at::kFloat ? ", BFloat16 or Half" : ", the sum's",
              ", got ", dtype);
}

inline void check_output_type(const LayerNormCall& call) {
  const auto input = call.input.scalar_type();
  TORCH_CHECK(is_type_beside(call.output_type(), input), call.centered ? "layer_norm" : "rms_norm",
              ": dtype: expected ", input,
              input == at::kFloat ? ", BFloat16 or Half" : ", the input's", ", got ",
              call.output_type());
}

inline void check_forward(const LayerNormCall& call) {
  check_column_shape(call.weight, "weight", call.shape);
  check_column_shape(call.bias, "bias", call.shape);
  check_normalized_shape(call.input, call.shape, call.centered);
  check_norm_input(call.input, call.centered);
  check_output_type(call);
  check_vector_types(call);
  check_same_device(call.weight, call.input,
                    call.centered ? "layer_norm: weight" : "rms_norm: weight");
  check_same_device(call.bias, call.input, "layer_norm: bias");
  TORCH_CHECK_NOT_IMPLEMENTED(!call.weight.defined() || !call.weight.is_complex(),
                              "rms_norm: weight: expected a real type, got ",
                              call.weight.scalar_type());
}

// Sizes of the statistics: the input's, with 1 for the normalized dimensions.
inline c10::SymDimVector stats_sizes(const Tensor& input, SymIntArrayRef shape) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  for (size_t i = sizes.size() - shape.size(); i < sizes.size(); ++i) sizes[i] = 1;
  return sizes;
}

inline void check_backward(const LayerNormBackwardCall& call) {
  const Tensor& input = call.input;
  const bool centered = call.centered;
  check_column_shape(call.weight, "weight", call.shape);
  check_normalized_shape(input, call.shape, centered);
  check_norm_input(input, centered);
  const auto grad_type = call.grad_output.scalar_type();
  check_argument(call.grad_output,
                 centered ? "layer_norm_backward: grad_output" : "rms_norm_backward: grad_output",
                 input.sym_sizes(),
                 is_type_beside(grad_type, input.scalar_type()) ? grad_type : input.scalar_type(),
                 input);
  check_same_device(call.weight, input,
                    centered ? "layer_norm_backward: weight" : "rms_norm_backward: weight");
  const auto sizes = stats_sizes(input, call.shape);
  if (centered) {
    check_argument(call.mean, "layer_norm_backward: mean", sizes, stats_type(input), input);
  }
  check_argument(call.rstd, centered ? "layer_norm_backward: rstd" : "rms_norm_backward: rstd",
                 sizes, stats_type(input), input);
}

// ---- outputs ----

// rms_norm keeps channels_last, as native's does.
inline at::MemoryFormat output_format(const Tensor& input, bool centered) {
  const auto format = input.suggest_memory_format();
  const bool last =
      format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
  return last && !centered ? format : at::MemoryFormat::Contiguous;
}

// Gradients of weight and bias have the weight's type, else the statistics'; autograd converts.
inline at::TensorOptions gradient_options(const LayerNormBackwardCall& call) {
  return call.weight.defined() ? call.weight.options() : call.rstd.options();
}

// ---- operands as the kernels take them ----

// Rows of `cols` contiguous elements, a constant step apart. Tensors with another layout are
// copied.
struct RowsView {
  Tensor held;
  int64_t stride;  // elements between rows

  RowsView(const Tensor& tensor, int64_t normalized_dims, int64_t cols)
      : held(tensor), stride(cols) {
    if (tensor.is_contiguous()) return;
    const int64_t leading = tensor.dim() - normalized_dims;
    int64_t expected = 1;
    bool fits = true;
    for (int64_t d = tensor.dim() - 1; d >= leading; --d) {
      fits = fits && (tensor.size(d) == 1 || tensor.stride(d) == expected);
      expected *= tensor.size(d);
    }
    int64_t step = -1;
    for (int64_t d = leading - 1; d >= 0; --d) {
      if (tensor.size(d) == 1) continue;
      if (step < 0) {
        stride = expected = tensor.stride(d);
        step = 0;
      }
      fits = fits && tensor.stride(d) == expected;
      expected *= tensor.size(d);
    }
    if (fits) return;
    held = tensor.contiguous();
    stride = cols;
  }
  const void* data() const { return held.const_data_ptr(); }
};

// In a type that the kernels take: the input's, or the statistics'.
inline Tensor as_columns(const Tensor& vector, const Tensor& input) {
  if (!vector.defined()) return vector;
  const auto type = vector.scalar_type();
  const bool taken = type == input.scalar_type() || type == stats_type(input);
  return (taken ? vector : vector.to(stats_type(input))).contiguous();
}

inline NormVector norm_vector(const Tensor& columns, bool writable = false) {
  if (!columns.defined()) return {};
  return {writable ? columns.mutable_data_ptr() : const_cast<void*>(columns.const_data_ptr()),
          dtype_of(columns)};
}

// ---- calls ----

// Output, mean and rstd; rms_norm's mean is undefined.
template <class Run>
Tensors3 forward_with(const LayerNormCall& call, Run&& run) {
  check_forward(call);
  const Tensor& input = call.input;
  check_has_storage(input, call.centered ? "layer_norm: input" : "rms_norm: input");
  check_has_storage(call.weight, call.centered ? "layer_norm: weight" : "rms_norm: weight");
  check_has_storage(call.bias, "layer_norm: bias");
  Tensor output = at::empty(input.sizes(), input.options().dtype(call.output_type()));
  const auto options = input.options().dtype(stats_type(input));
  const auto sizes = C10_AS_INTARRAYREF_SLOW_ALLOC(stats_sizes(input, call.shape));
  const bool empty = input.numel() == 0;
  auto statistics = [&] { return empty ? at::zeros(sizes, options) : at::empty(sizes, options); };
  Tensor mean = call.centered ? statistics() : Tensor(), rstd = statistics();
  const auto format =
      call.branch.defined() ? at::MemoryFormat::Contiguous : output_format(input, call.centered);
  if (empty) return {output.contiguous(format), mean, rstd};
  LayerNormParams p{};
  p.dtype = dtype_of(input);
  p.output_dtype = dtype_of(output);
  p.centered = call.centered;
  p.rows = rstd.numel();
  p.cols = input.numel() / p.rows;
  const auto dims = static_cast<int64_t>(call.shape.size());
  const RowsView x(input, dims, p.cols);
  std::optional<RowsView> branch;
  if (call.branch.defined()) {
    branch.emplace(call.branch, dims, p.cols);
    p.branch = branch->data();
    p.branch_dtype = dtype_of(call.branch);
    p.branch_stride = branch->stride;
    p.sum = call.sum.mutable_data_ptr();
  }
  const Tensor weight = as_columns(call.weight, input), bias = as_columns(call.bias, input);
  p.input = x.data();
  p.input_stride = x.stride;
  p.output = output.mutable_data_ptr();
  p.weight = norm_vector(weight);
  p.bias = norm_vector(bias);
  p.eps = call.eps;
  p.mean = call.centered ? mean.mutable_data_ptr() : nullptr;
  p.rstd = rstd.mutable_data_ptr();
  run(p);
  return {output.contiguous(format), mean, rstd};
}

// The gradients of input, weight and bias; undefined if not wanted.
template <class Run>
Tensors3 backward_with(const LayerNormBackwardCall& call, Run&& run) {
  check_backward(call);
  const Tensor& input = call.input;
  check_has_storage(call.grad_output, "layer_norm_backward: grad_output");
  check_has_storage(input, "layer_norm_backward: input");
  check_has_storage(call.weight, "layer_norm_backward: weight");
  check_has_storage(call.mean, "layer_norm_backward: mean");
  check_has_storage(call.rstd, "layer_norm_backward: rstd");
  const bool empty = input.numel() == 0;
  const auto options = gradient_options(call);
  const auto sizes = C10_AS_INTARRAYREF_SLOW_ALLOC(call.shape);
  auto vector = [&](bool wanted) {
    if (!wanted) return Tensor();
    const auto type = as_columns(call.weight, input);
    const auto own = type.defined() ? options.dtype(type.scalar_type()) : options;
    return empty ? at::zeros(sizes, own) : at::empty(sizes, own);
  };
  Tensor grad_input = call.wanted[0] ? at::empty(input.sizes(), input.options()) : Tensor();
  Tensor grad_weight = vector(call.wanted[1]), grad_bias = vector(call.wanted[2]);
  const bool nothing = !call.wanted[0] && !call.wanted[1] && !call.wanted[2];
  if (!empty && !nothing) {
    LayerNormBackwardParams p{};
    p.dtype = dtype_of(input);
    p.grad_dtype = dtype_of(call.grad_output);
    p.centered = call.centered;
    p.rows = call.rstd.numel();
    p.cols = input.numel() / p.rows;
    const auto dims = static_cast<int64_t>(call.shape.size());
    const RowsView dy(call.grad_output, dims, p.cols), x(input, dims, p.cols);
    std::optional<RowsView> ds;
    if (call.grad_sum.defined()) {
      ds.emplace(call.grad_sum, dims, p.cols);
      p.grad_sum = ds->data();
      p.grad_sum_stride = ds->stride;
      p.branch_dtype = dtype_of(call.grad_branch.defined() ? call.grad_branch : input);
      p.grad_branch = call.grad_branch.defined() ? call.grad_branch.mutable_data_ptr() : nullptr;
    }
    const Tensor weight = as_columns(call.weight, input), rstd = call.rstd.contiguous();
    const Tensor mean = call.centered ? call.mean.contiguous() : Tensor();
    p.grad_output = dy.data();
    p.grad_stride = dy.stride;
    p.input = x.data();
    p.input_stride = x.stride;
    p.weight = norm_vector(weight);
    p.mean = call.centered ? mean.const_data_ptr() : nullptr;
    p.rstd = rstd.const_data_ptr();
    p.grad_input = grad_input.defined() ? grad_input.mutable_data_ptr() : nullptr;
    p.grad_weight = norm_vector(grad_weight, /*writable=*/true);
    p.grad_bias = norm_vector(grad_bias, /*writable=*/true);
    run(p);
  }
  auto as_weight = [&](const Tensor& t) {
    return t.defined() ? t.to(options.dtype().toScalarType()) : t;
  };
  return {grad_input, as_weight(grad_weight), as_weight(grad_bias)};
}

#ifdef WARPWRIGHT_WITH_CUDA
inline void run_forward_cuda(const LayerNormParams& p, cudaStream_t stream) {
  launch_layer_norm(p, choose_layer_norm(p, norm_addresses(p), current_device_info()), stream);
}

inline void run_backward_cuda(const LayerNormBackwardParams& p, const Tensor& like,
                              cudaStream_t stream) {
  const LayerNormBackwardPlan plan =
      choose_layer_norm_backward(p, norm_addresses(p), current_device_info());
  const Tensor workspace = at::empty({plan.workspace_bytes(p)}, like.options().dtype(at::kByte));
  launch_layer_norm_backward(p, plan, workspace.mutable_data_ptr(), stream);
}
#endif

// ---- Meta ----

inline Tensors3 forward_meta(const LayerNormCall& call) {
  check_forward(call);
  const Tensor& input = call.input;
  const auto options = input.options().dtype(stats_type(input));
  const auto sizes = stats_sizes(input, call.shape);
  return {at::empty_symint(input.sym_sizes(), input.options().dtype(call.output_type()),
                           output_format(input, call.centered)),
          call.centered ? at::empty_symint(sizes, options) : Tensor(),
          at::empty_symint(sizes, options)};
}

inline Tensors3 backward_meta(const LayerNormBackwardCall& call) {
  check_backward(call);
  auto vector = [&](bool wanted) {
    return wanted ? at::empty_symint(call.shape, gradient_options(call)) : Tensor();
  };
  return {
      call.wanted[0] ? at::empty_symint(call.input.sym_sizes(), call.input.options()) : Tensor(),
      vector(call.wanted[1]), vector(call.wanted[2])};
}

// ---- the ops through the dispatcher ----

using OptionalType = std::optional<at::ScalarType>;

inline Tensors3 call_layer_norm(const Tensor& input, SymIntArrayRef shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, OptionalType dtype) {
  static const auto op =
      find_op<Tensors3(const Tensor&, SymIntArrayRef, const OptionalTensor&, const OptionalTensor&,
                       double, OptionalType)>("warpwright::layer_norm");
  return op.call(input, shape, weight, bias, eps, dtype);
}

inline Tensors2 call_rms_norm(const Tensor& input, SymIntArrayRef shape,
                              const OptionalTensor& weight, std::optional<double> eps,
                              OptionalType dtype) {
  static const auto op =
      find_op<Tensors2(const Tensor&, SymIntArrayRef, const OptionalTensor&, std::optional<double>,
                       OptionalType)>("warpwright::rms_norm");
  return op.call(input, shape, weight, eps, dtype);
}

// For both ops.
inline Tensors3 call_backward(const Tensor& grad_output, const Tensor& input, SymIntArrayRef shape,
                              const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                              std::array<bool, 3> wanted) {
  if (!mean.defined()) {
    static const auto op =
        find_op<Tensors2(const Tensor&, const Tensor&, SymIntArrayRef, const OptionalTensor&,
                         const Tensor&, std::array<bool, 2>)>("warpwright::rms_norm_backward");
    auto [dx, dw] = op.call(grad_output, input, shape, weight, rstd, {wanted[0], wanted[1]});
    return {dx, dw, Tensor()};
  }
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, SymIntArrayRef, const OptionalTensor&,
                       const Tensor&, const Tensor&, std::array<bool, 3>)>(
          "warpwright::layer_norm_backward");
  return op.call(grad_output, input, shape, weight, mean, rstd, wanted);
}

}  // namespace warpwright
