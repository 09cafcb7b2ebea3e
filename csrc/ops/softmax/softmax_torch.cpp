// softmax, log_softmax and their backwards on every dispatch key.
//
// softmax's Jacobian is symmetric: y (t - sum(y t)) is its backward and also the output's change
// along a change t of the input. log_softmax's are dy - exp(y) sum(dy) and t - sum(exp(y) t).
#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include "ops/softmax/softmax.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using OptionalType = std::optional<at::ScalarType>;

namespace call {

template <bool kLog>
Tensor softmax(const Tensor& input, int64_t dim, OptionalType dtype) {
  static const auto op = find_op<Tensor(const Tensor&, int64_t, OptionalType)>(
      kLog ? "warpwright::log_softmax" : "warpwright::softmax");
  return op.call(input, dim, dtype);
}

template <bool kLog>
Tensor softmax_backward(const Tensor& grad_output, const Tensor& output, int64_t dim,
                        at::ScalarType input_dtype) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, int64_t, at::ScalarType)>(
      kLog ? "warpwright::log_softmax_backward" : "warpwright::softmax_backward");
  return op.call(grad_output, output, dim, input_dtype);
}

}  // namespace call

// ---- output shape and checks ----

// Whether a kernel writes `output` next to elements of `input`'s type.
bool is_result_type(at::ScalarType output, at::ScalarType input) {
  return output == input ||
         (output == at::kFloat && (input == at::kHalf || input == at::kBFloat16));
}

// The operand of the kernel: a type that no kernel reads is converted first, as native does.
template <bool kLog>
Tensor as_operand(const Tensor& input, OptionalType dtype) {
  if (dtype) check_is_dtype(*dtype, kLog ? "log_softmax: dtype" : "softmax: dtype");
  check_plain_storage(input, kLog ? "log_softmax: input" : "softmax: input");
  return is_result_type(dtype.value_or(input.scalar_type()), input.scalar_type())
             ? input
             : input.to(*dtype);
}

// Returns the wrapped dimension.
template <bool kLog>
int64_t check_softmax(const Tensor& operand, int64_t dim) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_floating(operand.scalar_type()),
      kLog ? "\"log_softmax_lastdim_kernel_impl\"" : "\"softmax_lastdim_kernel_impl\"",
      " not implemented for '", operand.scalar_type(), "'");
  return at::maybe_wrap_dim(dim, operand.dim());
}

// Contiguous whatever the input's strides, as native's result is.
Tensor empty_output(const Tensor& operand, OptionalType dtype) {
  return at::empty_symint(operand.sym_sizes(),
                          operand.options().dtype(dtype.value_or(operand.scalar_type())));
}

template <bool kLog>
int64_t check_backward(const Tensor& grad_output, const Tensor& output, int64_t dim,
                       at::ScalarType input_dtype) {
  const char* op = kLog ? "log_softmax_backward" : "softmax_backward";
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(output.scalar_type()), op,
                              ": output: expected a real floating-point tensor, got ",
                              output.scalar_type());
  check_argument(grad_output,
                 kLog ? "log_softmax_backward: grad_output" : "softmax_backward: grad_output",
                 output.sym_sizes(), output.scalar_type(), output);
  TORCH_CHECK(is_result_type(output.scalar_type(), input_dtype), op, ": input_dtype: expected ",
              output.scalar_type(),
              output.scalar_type() == at::kFloat ? ", BFloat16 or Half" : ", the output's",
              ", got ", input_dtype);
  return at::maybe_wrap_dim(dim, output.dim());
}

SoftmaxShape softmax_shape(const Tensor& tensor, int64_t dim, DType dtype, DType output_dtype,
                           bool is_log) {
  SoftmaxShape shape{.dtype = dtype, .output_dtype = output_dtype, .is_log = is_log};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    (d < dim ? shape.outer : d == dim ? shape.length : shape.inner) *= tensor.size(d);
  }
  if (shape.length == 1) {  // rows of one element are faster than columns of one
    shape.outer *= shape.inner;
    shape.inner = 1;
  }
  return shape;
}

// ---- CPU and CUDA ----

template <bool kLog, class Run>
Tensor softmax_with(const Tensor& input, int64_t dim, OptionalType dtype, Run&& run) {
  check_has_storage(input, kLog ? "log_softmax: input" : "softmax: input");
  const Tensor operand = as_operand<kLog>(input, dtype);
  dim = check_softmax<kLog>(operand, dim);
  Tensor output = empty_output(operand, dtype);
  if (output.numel() == 0) return output;
  const Tensor source = operand.contiguous();
  run(SoftmaxParams{softmax_shape(output, dim, dtype_of(source), dtype_of(output), kLog),
                    source.const_data_ptr(), output.mutable_data_ptr()});
  return output;
}

template <bool kLog, class Run>
Tensor softmax_backward_with(const Tensor& grad_output, const Tensor& output, int64_t dim,
                             at::ScalarType input_dtype, Run&& run) {
  dim = check_backward<kLog>(grad_output, output, dim, input_dtype);
  check_has_storage(grad_output, "softmax_backward: grad_output");
  check_has_storage(output, "softmax_backward: output");
  Tensor grad_input = empty_output(output, input_dtype);
  if (output.numel() == 0) return grad_input;
  const Tensor y = output.contiguous(), dy = grad_output.contiguous();
  run(SoftmaxBackwardParams{softmax_shape(output, dim, dtype_of(grad_input), dtype_of(y), kLog),
                            dy.const_data_ptr(), y.const_data_ptr(),
                            grad_input.mutable_data_ptr()});
  return grad_input;
}

template <bool kLog>
Tensor softmax_cpu_kernel(const Tensor& input, int64_t dim, OptionalType dtype) {
  return softmax_with<kLog>(input, dim, dtype, softmax_cpu);
}
template <bool kLog>
Tensor softmax_backward_cpu_kernel(const Tensor& grad_output, const Tensor& output, int64_t dim,
                                   at::ScalarType input_dtype) {
  return softmax_backward_with<kLog>(grad_output, output, dim, input_dtype, softmax_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
template <bool kLog>
Tensor softmax_cuda_kernel(const Tensor& input, int64_t dim, OptionalType dtype) {
  const CudaCall cuda(input);
  return softmax_with<kLog>(input, dim, dtype, [&](const SoftmaxParams& p) {
    launch_softmax(p, choose_softmax(p, current_device_info()), cuda.stream);
  });
}
template <bool kLog>
Tensor softmax_backward_cuda_kernel(const Tensor& grad_output, const Tensor& output, int64_t dim,
                                    at::ScalarType input_dtype) {
  const CudaCall cuda(output);
  return softmax_backward_with<kLog>(
      grad_output, output, dim, input_dtype, [&](const SoftmaxBackwardParams& p) {
        launch_softmax_backward(p, choose_softmax_backward(p, current_device_info()), cuda.stream);
      });
}
#endif

// ---- Meta ----

template <bool kLog>
Tensor softmax_meta(const Tensor& input, int64_t dim, OptionalType dtype) {
  const Tensor operand = as_operand<kLog>(input, dtype);
  check_softmax<kLog>(operand, dim);
  return empty_output(operand, dtype);
}
template <bool kLog>
Tensor softmax_backward_meta(const Tensor& grad_output, const Tensor& output, int64_t dim,
                             at::ScalarType input_dtype) {
  check_backward<kLog>(grad_output, output, dim, input_dtype);
  return empty_output(output, input_dtype);
}

// ---- Autograd ----

Tensor sum_along(const Tensor& value, int64_t dim) { return value.sum(dim, /*keepdim=*/true); }

struct SoftmaxAttributes {
  int64_t dim;
  at::ScalarType input_dtype;
};

template <bool kLog>
struct SoftmaxBackward {  // saved: output
  static constexpr const char* kName =
      kLog ? "WarpwrightLogSoftmaxBackward" : "WarpwrightSoftmaxBackward";
  using Attributes = SoftmaxAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    return {call::softmax_backward<kLog>(grads[0], saved[0], a.dim, a.input_dtype)};
  }
};

// The output's change along a change of the input.
template <bool kLog>
Tensor softmax_tangent(const Tensor& moved, const Tensor& output, int64_t dim) {
  const Tensor t = moved.to(output.scalar_type());
  if constexpr (kLog) return t - sum_along(output.exp() * t, dim);
  return call::softmax_backward<false>(t, output, dim, output.scalar_type());
}

template <bool kLog>
Tensor softmax_autograd(const Tensor& input, int64_t dim, OptionalType dtype) {
  const Tensor operand = as_operand<kLog>(input, dtype);
  dim = check_softmax<kLog>(operand, dim);
  const SoftmaxAttributes attributes{dim, operand.scalar_type()};
  auto node = make_node<SoftmaxBackward<kLog>>(attributes, operand);
  Tensor output = below_autograd([&] { return call::softmax<kLog>(operand, dim, dtype); });
  if (node) set_history(output, node);
  if (has_tangent(operand)) {
    const Tensor moved = softmax_tangent<kLog>(tangent(operand), output, dim);
    set_tangent(output, tangent_with_zero_terms(moved, operand));
  }
  if (node) node->save_output(output);  // with its tangent
  return output;
}

// The gradients of <v, dx> by dy and by y.
template <bool kLog>
struct SoftmaxBackwardBackward {  // saved: grad_output, output
  static constexpr const char* kName =
      kLog ? "WarpwrightLogSoftmaxBackwardBackward" : "WarpwrightSoftmaxBackwardBackward";
  using Attributes = SoftmaxAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &dy = saved[0], &y = saved[1];
    const Tensor v = grads[0].to(y.scalar_type());
    variable_list results(2);
    if (needs[0]) results[0] = softmax_tangent<kLog>(v, y, a.dim);
    if (needs[1] && kLog) {
      results[1] = -(v * y.exp() * sum_along(dy, a.dim));
    } else if (needs[1]) {
      results[1] = v * (dy - sum_along(y * dy, a.dim)) - dy * sum_along(y * v, a.dim);
    }
    return results;
  }
};

// The change of dx along changes of dy and y.
template <bool kLog>
Tensor backward_tangent(const Tensor& grad_output, const Tensor& output, int64_t dim) {
  const Tensor y = primal(output), dy = primal(grad_output);
  Tensor moved;
  if (has_tangent(grad_output)) {
    moved = call::softmax_backward<kLog>(tangent(grad_output), y, dim, y.scalar_type());
  }
  if (has_tangent(output)) {
    const Tensor y_t = tangent(output);
    const Tensor by_output =
        kLog ? -(y.exp() * y_t * sum_along(dy, dim))
             : y_t * (dy - sum_along(y * dy, dim)) - y * sum_along(y_t * dy, dim);
    moved = sum_of(moved, by_output);
  }
  return moved;
}

template <bool kLog>
Tensor softmax_backward_autograd(const Tensor& grad_output, const Tensor& output, int64_t dim,
                                 at::ScalarType input_dtype) {
  dim = check_backward<kLog>(grad_output, output, dim, input_dtype);
  auto node = make_node<SoftmaxBackwardBackward<kLog>>({dim, input_dtype}, grad_output, output);
  Tensor grad_input = below_autograd(
      [&] { return call::softmax_backward<kLog>(grad_output, output, dim, input_dtype); });
  if (node) {
    node->save(grad_output);
    node->save(output);
    set_history(grad_input, node);
  }
  if (any_tangent(grad_output, output)) {
    const Tensor moved = backward_tangent<kLog>(grad_output, output, dim).to(input_dtype);
    set_tangent(grad_input, tangent_with_zero_terms(moved, grad_output, output));
  }
  return grad_input;
}

// ---- Autocast: float32 results on a GPU unless `dtype` says otherwise, as native's. The kernel
// ---- reads the 16-bit input itself.

template <bool kLog>
Tensor softmax_autocast(const Tensor& input, int64_t dim, OptionalType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  const bool eligible =
      input.is_cuda() && input.is_floating_point() && input.scalar_type() != at::kDouble;
  return call::softmax<kLog>(input, dim, eligible && !dtype ? at::kFloat : dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("log_softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "log_softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("softmax", softmax_cpu_kernel<false>);
  m.impl("log_softmax", softmax_cpu_kernel<true>);
  m.impl("softmax_backward", softmax_backward_cpu_kernel<false>);
  m.impl("log_softmax_backward", softmax_backward_cpu_kernel<true>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("softmax", softmax_cuda_kernel<false>);
  m.impl("log_softmax", softmax_cuda_kernel<true>);
  m.impl("softmax_backward", softmax_backward_cuda_kernel<false>);
  m.impl("log_softmax_backward", softmax_backward_cuda_kernel<true>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("softmax", softmax_meta<false>);
  m.impl("log_softmax", softmax_meta<true>);
  m.impl("softmax_backward", softmax_backward_meta<false>);
  m.impl("log_softmax_backward", softmax_backward_meta<true>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("softmax", softmax_autograd<false>);
  m.impl("log_softmax", softmax_autograd<true>);
  m.impl("softmax_backward", softmax_backward_autograd<false>);
  m.impl("log_softmax_backward", softmax_backward_autograd<true>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("softmax", torch::CppFunction::makeFallthrough());
  m.impl("log_softmax", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("softmax", softmax_autocast<false>);
  m.impl("log_softmax", softmax_autocast<true>);
}

}  // namespace warpwright
