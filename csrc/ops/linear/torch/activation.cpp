// linear_activation and linear_activation_backward on every dispatch key. The backward is the
// gradient of the activation alone, with the bias gradient in the same pass; the rest is linear's.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros_like.h>

#include <string_view>
#include <utility>

#include "ops/linear/activation.h"
#include "ops/linear/torch/activation.h"
#include "ops/linear/torch/autocast.h"
#include "ops/linear/torch/common.h"

namespace warpwright {

using TensorPair = std::tuple<Tensor, Tensor>;

namespace linear_ops {

TensorPair linear_activation(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             std::string_view activation, bool keep) {
  static const auto op =
      find_op<TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                         bool)>("warpwright::linear_activation");
  return op.call(input, weight, bias, activation, keep);
}

TensorPair linear_activation_backward(const Tensor& grad_output, const Tensor& kept,
                                      std::string_view activation, bool bias_gradient,
                                      bool float32_bias) {
  static const auto op =
      find_op<TensorPair(const Tensor&, const Tensor&, std::string_view, bool, bool)>(
          "warpwright::linear_activation_backward");
  return op.call(grad_output, kept, activation, bias_gradient, float32_bias);
}

}  // namespace linear_ops

namespace {

// ---- output shape and checks ----

// Whether the kernels support the call. Others run linear and the native activation.
bool is_fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return is_plain_linear(input, weight, bias) && is_floating(input.scalar_type());
}

Tensor native_activation(const Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return at::relu(z);
    case Activation::kGelu:
      return at::gelu(z, "none");
    case Activation::kGeluTanh:
      return at::gelu(z, "tanh");
    default:
      return at::silu(z);
  }
}

Tensor nothing_like(const Tensor& tensor) { return empty_of({0}, tensor); }

TensorPair linear_activation_composed(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, Activation activation,
                                      bool keep) {
  const Tensor z = linear_ops::linear(input, weight, bias);
  return {native_activation(z, activation), keep ? z : nothing_like(z)};
}

void check_linear_activation_backward(const Tensor& grad_output, const Tensor& kept,
                                      bool float32_bias) {
  TORCH_CHECK(grad_output.dim() >= 1,
              "linear_activation_backward: grad_output: expected at least 1D, got 0D");
  TORCH_CHECK(grad_output.sym_sizes() == kept.sym_sizes(),
              "linear_activation_backward: kept: expected shape ", grad_output.sym_sizes(),
              ", got ", kept.sym_sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(kept.scalar_type()),
                              "\"linear_activation_backward\" not implemented for '",
                              kept.scalar_type(), "'");
  check_same_type(grad_output, kept, "linear_activation_backward", "kept");
  TORCH_CHECK(!float32_bias || is_16bit(kept.scalar_type()),
              "linear_activation_backward: float32_bias: expected 16-bit operands, got ",
              kept.scalar_type());
}

// Results of the forward (output, pre-activation) and of the backward (dz, bias gradient).
TensorPair empty_outputs(const Tensor& input, const Tensor& weight, bool keep) {
  const auto sizes = with_last_size(input, weight.sym_size(0));
  return {empty_of(sizes, input), keep ? empty_of(sizes, input) : nothing_like(input)};
}
TensorPair empty_gradients(const Tensor& kept, bool bias_gradient, bool float32_bias) {
  const auto options = float32_bias ? kept.options().dtype(at::kFloat) : kept.options();
  return {empty_of(kept.sym_sizes(), kept),
          bias_gradient ? at::empty_symint({kept.sym_size(-1)}, options) : Tensor()};
}

// ---- CPU and CUDA ----

template <class Runner>
TensorPair linear_activation_with(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, Activation activation, bool keep,
                                  const Runner& runner) {
  check_linear(input, weight, bias);
  const OptionalTensor dense_bias = linear_operands(input, weight, bias);
  TensorPair outputs = empty_outputs(input, weight, keep);
  auto& [output, preactivation] = outputs;
  const Matrix x = as_matrix(input), w = as_matrix(weight);  // they own any copies
  GemmParams p = gemm_params(x, w, dense_bias, output);
  p.activation = activation;
  p.preactivation = keep ? preactivation.mutable_data_ptr() : nullptr;
  runner.gemm(p);
  return outputs;
}

template <class Runner>
TensorPair linear_activation_backward_with(const Tensor& grad_output, const Tensor& kept,
                                           Activation activation, bool bias_gradient,
                                           bool float32_bias, const Runner& runner) {
  check_linear_activation_backward(grad_output, kept, float32_bias);
  check_has_storage(grad_output, "linear_activation_backward: grad_output");
  check_has_storage(kept, "linear_activation_backward: kept");
  TensorPair gradients = empty_gradients(kept, bias_gradient, float32_bias);
  auto& [dz, db] = gradients;
  const int64_t cols = kept.size(-1);
  const int64_t rows = cols == 0 ? 0 : kept.numel() / cols;
  const Tensor dense = kept.contiguous();
  const Tensor dy = grad_output.reshape({rows, cols});
  runner.activation_backward({.column_sum = {.dtype = dtype_of(kept),
                                             .rows = rows,
                                             .cols = cols,
                                             .matrix = dy.const_data_ptr(),
                                             .stride_row = dy.stride(0),
                                             .stride_col = dy.stride(1),
                                             .sum = bias_gradient ? db.mutable_data_ptr() : nullptr,
                                             .wide_sum = float32_bias},
                              .activation = activation,
                              .kept = dense.const_data_ptr(),
                              .grad_preactivation = dz.mutable_data_ptr()});
  return gradients;
}

struct ActivationCpu : LinearCpu {
  void activation_backward(const LinearActivationBackwardParams& p) const {
    linear_activation_backward_cpu(p);
  }
};

TensorPair linear_activation_cpu_kernel(const Tensor& input, const Tensor& weight,
                                        const OptionalTensor& bias, std::string_view activation,
                                        bool keep) {
  const Activation f = find_linear_activation(activation);
  if (!is_fused(input, weight, bias)) {
    return linear_activation_composed(input, weight, bias, f, keep);
  }
  return linear_activation_with(input, weight, bias, f, keep, ActivationCpu{});
}
TensorPair linear_activation_backward_cpu_kernel(const Tensor& grad_output, const Tensor& kept,
                                                 std::string_view activation, bool bias_gradient,
                                                 bool float32_bias) {
  return linear_activation_backward_with(grad_output, kept, find_linear_activation(activation),
                                         bias_gradient, float32_bias, ActivationCpu{});
}

#ifdef WARPWRIGHT_WITH_CUDA
struct ActivationCuda : LinearCuda {
  using LinearCuda::LinearCuda;

  void activation_backward(const LinearActivationBackwardParams& p) const {
    const ColumnSumPlan plan = choose_linear_activation_backward(p, current_device_info());
    const Tensor parts = workspace(plan.workspace_bytes);
    launch_linear_activation_backward(p, plan, data(parts), stream);
  }
};

TensorPair linear_activation_cuda_kernel(const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, std::string_view activation,
                                         bool keep) {
  const Activation f = find_linear_activation(activation);
  if (!is_fused(input, weight, bias)) {
    return linear_activation_composed(input, weight, bias, f, keep);
  }
  const CudaCall call(input);
  return linear_activation_with(input, weight, bias, f, keep, ActivationCuda(call, input));
}
TensorPair linear_activation_backward_cuda_kernel(const Tensor& grad_output, const Tensor& kept,
                                                  std::string_view activation, bool bias_gradient,
                                                  bool float32_bias) {
  check_linear_activation_backward(grad_output, kept, float32_bias);
  const CudaCall call(kept);
  return linear_activation_backward_with(grad_output, kept, find_linear_activation(activation),
                                         bias_gradient, float32_bias, ActivationCuda(call, kept));
}
#endif

// ---- Meta ----

TensorPair linear_activation_meta(const Tensor& input, const Tensor& weight,
                                  const OptionalTensor& bias, std::string_view activation,
                                  bool keep) {
  const Activation f = find_linear_activation(activation);
  if (!is_fused(input, weight, bias)) {
    return linear_activation_composed(input, weight, bias, f, keep);
  }
  check_linear(input, weight, bias);
  return empty_outputs(input, weight, keep);
}
TensorPair linear_activation_backward_meta(const Tensor& grad_output, const Tensor& kept,
                                           std::string_view activation, bool bias_gradient,
                                           bool float32_bias) {
  find_linear_activation(activation);
  check_linear_activation_backward(grad_output, kept, float32_bias);
  return empty_gradients(kept, bias_gradient, float32_bias);
}

// ---- Autograd ----

struct LinearActivationBackwardBackward {  // saved: grad_output (not of a relu), kept
  static constexpr const char* kName = "WarpwrightLinearActivationBackwardBackward";
  struct Attributes {
    Activation activation;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &dy = saved[0], &kept = saved[1];
    Tensor gradient_of_db = grads.size() > 1 ? grads[1] : Tensor();  // with a bias
    if (gradient_of_db.defined()) gradient_of_db = gradient_of_db.to(kept.scalar_type());
    const Tensor gradient_of_dz =
        sum_of(grads[0], gradient_of_db.defined() ? gradient_of_db.expand_symint(kept.sym_sizes())
                                                  : Tensor());
    variable_list result(2);
    if (needs[0]) {
      result[0] = std::get<0>(linear_ops::linear_activation_backward(
          gradient_of_dz, kept, activation_name(a.activation), /*bias_gradient=*/false));
    }
    if (needs[1]) {
      result[1] = a.activation == Activation::kRelu  // constant almost everywhere
                      ? at::zeros_like(kept)
                      : gradient_of_dz * dy * second_derivative(kept, a.activation);
    }
    return result;
  }
};

TensorPair linear_activation_backward_autograd(const Tensor& grad_output, const Tensor& kept,
                                               std::string_view activation, bool bias_gradient,
                                               bool float32_bias) {
  const Activation f = find_linear_activation(activation);
  auto node = make_node<LinearActivationBackwardBackward>({f}, grad_output, kept);
  TensorPair gradients = below_autograd([&] {
    return linear_ops::linear_activation_backward(grad_output, kept, activation, bias_gradient,
                                                  float32_bias);
  });
  auto& [dz, db] = gradients;
  if (node) {
    node->save(f == Activation::kRelu ? Tensor() : grad_output);
    node->save(kept);
    set_history(dz, node);
    if (db.defined()) set_history(db, node);
  }
  if (any_tangent(grad_output, kept)) {
    const Tensor z = primal(kept);
    Tensor direction;
    if (has_tangent(grad_output)) {
      direction = std::get<0>(
          linear_ops::linear_activation_backward(tangent(grad_output), z, activation, false));
    }
    if (has_tangent(kept)) {
      direction = sum_of(direction, f == Activation::kRelu ? at::zeros_like(dz)
                                                           : primal(grad_output) * tangent(kept) *
                                                                 second_derivative(z, f));
    }
    set_tangent(dz, direction);
    if (db.defined()) {
      set_tangent(db, direction.reshape_symint({-1, kept.sym_size(-1)})
                          .sum(0, /*keepdim=*/false, db.scalar_type()));
    }
  }
  return gradients;
}

struct LinearActivationBackward {  // saved: input, weight, kept
  static constexpr const char* kName = "WarpwrightLinearActivationBackward";
  struct Attributes {
    Activation activation;
    std::array<bool, 3> float32;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    // Gradients of the output and, if it is an output too, of the pre-activation.
    const Tensor& dy = grads[0];
    const Tensor direct = grads.size() > 1 ? grads[1] : Tensor();
    Tensor dz, db;
    if (dy.defined()) {
      std::tie(dz, db) = linear_ops::linear_activation_backward(
          dy, saved[2], activation_name(a.activation), needs[2] && !direct.defined(), a.float32[2]);
    }
    auto [dx, dw, whole_db] = linear_ops::linear_backward(
        sum_of(dz, direct), optional_if_defined(saved[0]), optional_if_defined(saved[1]),
        {needs[0], needs[1], needs[2] && !db.defined()}, a.float32);
    return {dx, dw, db.defined() ? db : whole_db};
  }
};

// linear_activation and its node.
TensorPair differentiable_linear_activation(const Tensor& input, const Tensor& weight,
                                            const OptionalTensor& optional_bias,
                                            std::string_view activation, bool keep,
                                            const Sources& sources) {
  const Activation f = find_linear_activation(activation);
  const Tensor bias = value_or_undefined(optional_bias);
  auto node = make_node<LinearActivationBackward>({f, sources.in_float32(input.scalar_type())},
                                                  sources.input, sources.weight, sources.bias);
  const bool forward_ad = any_tangent(input, weight, bias);
  const bool needs_z = f != Activation::kRelu && (node || forward_ad);
  TensorPair outputs = below_autograd([&] {
    return linear_ops::linear_activation(input, weight, optional_bias, activation, keep || needs_z);
  });
  auto& [output, z] = outputs;
  const bool has_z = keep || needs_z;
  if (node) {
    // A frozen operand needs no gradient, so its partner need not be saved.
    node->save(requires_grad(sources.weight) ? input : Tensor());
    node->save(requires_grad(sources.input) ? weight : Tensor());
    set_history(output, node);
    if (has_z) set_history(z, node);
  }
  if (forward_ad) {
    // After set_history: the derivative of the activation is a function of the saved value.
    const Tensor direction = tangent_with_zero_terms(
        sum_of_linears(tangent_or_none(input), primal(weight), primal(input),
                       tangent_or_none(weight), tangent_or_none(bias), output),
        input, weight);
    const Tensor& kept = f == Activation::kRelu ? output : z;
    set_tangent(output, std::get<0>(linear_ops::linear_activation_backward(
                            direction, primal(kept), activation, /*bias_gradient=*/false)));
    if (has_z) set_tangent(z, direction);
  }
  if (node) node->save_output(f == Activation::kRelu ? output : z);  // with its tangent
  if (!keep) z = nothing_like(output);
  return outputs;
}

TensorPair linear_activation_autograd(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, std::string_view activation,
                                      bool keep) {
  if (!is_fused(input, weight, bias)) {
    return linear_activation_composed(input, weight, bias, find_linear_activation(activation),
                                      keep);
  }
  return differentiable_linear_activation(input, weight, bias, activation, keep,
                                          {input, weight, value_or_undefined(bias)});
}

// ---- Autocast: to the low-precision type, as native linear ----

template <c10::DeviceType kDevice>
TensorPair linear_activation_autocast(const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, std::string_view activation,
                                      bool keep) {
  const AutocastOperands cast(kDevice, input, weight, bias);
  if (!cast.direct) {
    return linear_ops::linear_activation(cast.input, cast.weight, cast.bias, activation, keep);
  }
  return differentiable_linear_activation(cast.input, cast.weight, cast.bias, activation, keep,
                                          {cast.source, weight, value_or_undefined(bias)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "linear_activation(Tensor input, Tensor weight, Tensor? bias, str activation, "
      "bool keep_preactivation=False) -> (Tensor output, Tensor preactivation)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_activation_backward(Tensor grad_output, Tensor kept, str activation, "
      "bool bias_gradient, bool float32_bias=False) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("linear_activation", linear_activation_cpu_kernel);
  m.impl("linear_activation_backward", linear_activation_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("linear_activation", linear_activation_cuda_kernel);
  m.impl("linear_activation_backward", linear_activation_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("linear_activation", linear_activation_meta);
  m.impl("linear_activation_backward", linear_activation_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("linear_activation", linear_activation_autograd);
  m.impl("linear_activation_backward", linear_activation_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("linear_activation", linear_activation_autocast<at::kCPU>);
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("linear_activation", linear_activation_autocast<at::kCUDA>);
}

}  // namespace warpwright
