// activation and activation_backward on every dispatch key.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/sigmoid.h>

#include <iterator>
#include <string_view>

#include "ops/activation/activation_loops.h"
#include "torch/activation.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dense.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using enum PointwiseActivation;

namespace call {

Tensor activation(const Tensor& input, PointwiseActivation f) {
  static const auto op = find_op<Tensor(const Tensor&, std::string_view)>("warpwright::activation");
  return op.call(input, kPointwiseActivations[static_cast<int>(f)]);
}

Tensor activation_backward(const Tensor& grad_output, const Tensor& kept, PointwiseActivation f) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>(
      "warpwright::activation_backward");
  return op.call(grad_output, kept, kPointwiseActivations[static_cast<int>(f)]);
}

}  // namespace call

// ---- output shape and checks ----

PointwiseActivation find_pointwise(std::string_view name, const char* op) {
  for (size_t i = 0; i < std::size(kPointwiseActivations); ++i) {
    if (name == kPointwiseActivations[i]) return static_cast<PointwiseActivation>(i);
  }
  TORCH_CHECK(false, op, ": activation: expected gelu, gelu_tanh, silu, sigmoid or tanh, got ",
              name);
}

void check_activation(const Tensor& input, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()), name,
                              ": expected a real floating-point tensor, got ", input.scalar_type());
}

void check_activation_backward(const Tensor& grad_output, const Tensor& kept) {
  check_activation(kept, "activation_backward: kept");
  check_argument(grad_output, "activation_backward: grad_output", kept.sym_sizes(),
                 kept.scalar_type(), kept);
}

// ---- CPU and CUDA ----

// Dense inputs keep their strides, others become dense in the same dimension order: ATen's
// preserve_format, which native returns too.
template <class Run>
Tensor activation_with(const Tensor& input, std::string_view activation, Run&& run) {
  const PointwiseActivation f = find_pointwise(activation, "activation");
  check_activation(input, "activation: input");
  check_has_storage(input, "activation: input");
  Tensor output = at::empty_like(input);
  const Tensor source = in_order_of(input, output);
  run(ActivationParams{dtype_of(input), f, input.numel(), source.const_data_ptr(),
                       output.mutable_data_ptr()});
  return output;
}

template <class Run>
Tensor activation_backward_with(const Tensor& grad_output, const Tensor& kept,
                                std::string_view activation, Run&& run) {
  const PointwiseActivation f = find_pointwise(activation, "activation_backward");
  check_activation_backward(grad_output, kept);
  check_has_storage(grad_output, "activation_backward: grad_output");
  check_has_storage(kept, "activation_backward: kept");
  Tensor grad_input = at::empty_like(kept);
  const Tensor dy = in_order_of(grad_output, grad_input), k = in_order_of(kept, grad_input);
  run(ActivationBackwardParams{dtype_of(kept), f, kept.numel(), dy.const_data_ptr(),
                               k.const_data_ptr(), grad_input.mutable_data_ptr()});
  return grad_input;
}

Tensor activation_cpu_kernel(const Tensor& input, std::string_view activation) {
  const bool dense_float32 =
      input.scalar_type() == at::kFloat && input.is_non_overlapping_and_dense();
  const bool enabled = at::globalContext().userEnabledMkldnn();
  if (onednn_is_faster(activation, dense_float32, input.numel(), enabled)) {
    check_has_storage(input, "activation: input");
    if (input.is_contiguous()) return at::gelu(input);
    // ATen hands no others to oneDNN, but the order of the elements does not matter.
    const auto flat = [&](const Tensor& tensor) { return tensor.as_strided({input.numel()}, {1}); };
    const Tensor output = at::empty_like(input);
    Tensor elements = flat(output);
    at::gelu_out(elements, flat(input));
    return output;
  }
  return activation_with(input, activation, activation_cpu);
}

Tensor activation_backward_cpu_kernel(const Tensor& grad_output, const Tensor& kept,
                                      std::string_view activation) {
  return activation_backward_with(grad_output, kept, activation, activation_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor activation_cuda_kernel(const Tensor& input, std::string_view activation) {
  const CudaCall call(input);
  return activation_with(input, activation, [&](const ActivationParams& p) {
    launch_activation(p, choose_activation(p), call.stream);
  });
}

Tensor activation_backward_cuda_kernel(const Tensor& grad_output, const Tensor& kept,
                                       std::string_view activation) {
  const CudaCall call(kept);
  return activation_backward_with(
      grad_output, kept, activation, [&](const ActivationBackwardParams& p) {
        launch_activation_backward(p, choose_activation_backward(p), call.stream);
      });
}
#endif

// ---- Meta ----

Tensor activation_meta(const Tensor& input, std::string_view activation) {
  find_pointwise(activation, "activation");
  check_activation(input, "activation: input");
  return at::empty_like(input);
}

Tensor activation_backward_meta(const Tensor& grad_output, const Tensor& kept,
                                std::string_view activation) {
  find_pointwise(activation, "activation_backward");
  check_activation_backward(grad_output, kept);
  return at::empty_like(kept);
}

// ---- Autograd ----

struct Attribute {
  PointwiseActivation f;
};

struct ActivationBackward {  // saved: kept
  static constexpr const char* kName = "WarpwrightActivationBackward";
  using Attributes = Attribute;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::activation_backward(grads[0], saved[0], a.f) : Tensor()};
  }
};

// activation_backward multiplies grad_output by a function of `kept`: this is its derivative.
Tensor slope(const Tensor& kept, PointwiseActivation f) {
  if (f == kSigmoid) return 1 - kept * 2;
  if (f == kTanh) return kept * -2;
  return second_derivative(kept, f == kGelu   ? Activation::kGelu
                                 : f == kSilu ? Activation::kSilu
                                              : Activation::kGeluTanh);
}

struct ActivationBackwardBackward {  // saved: grad_output, kept
  static constexpr const char* kName = "WarpwrightActivationBackwardBackward";
  using Attributes = Attribute;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::activation_backward(grads[0], saved[1], a.f) : Tensor(),
            needs[1] ? grads[0] * saved[0] * slope(saved[1], a.f) : Tensor()};
  }
};

Tensor activation_autograd(const Tensor& input, std::string_view activation) {
  const PointwiseActivation f = find_pointwise(activation, "activation");
  auto node = make_node<ActivationBackward>({f}, input);
  Tensor output = below_autograd([&] { return call::activation(input, f); });
  if (node) set_history(output, node);
  if (has_tangent(input)) {
    const Tensor kept = keeps_output(f) ? output : primal(input);
    set_tangent(output, call::activation_backward(tangent(input), kept, f));
  }
  if (node) keeps_output(f) ? node->save_output(output) : node->save(input);  // with its tangent
  return output;
}

Tensor activation_backward_autograd(const Tensor& grad_output, const Tensor& kept,
                                    std::string_view activation) {
  const PointwiseActivation f = find_pointwise(activation, "activation_backward");
  auto node = make_node<ActivationBackwardBackward>({f}, grad_output, kept);
  Tensor grad_input =
      below_autograd([&] { return call::activation_backward(grad_output, kept, f); });
  if (node) {
    node->save(grad_output);
    node->save(kept);
    set_history(grad_input, node);
  }
  if (any_tangent(grad_output, kept)) {
    Tensor of_grad, of_kept;
    const Tensor k = primal(kept);
    if (has_tangent(grad_output)) {
      of_grad = call::activation_backward(tangent(grad_output), k, f);
    }
    if (has_tangent(kept)) of_kept = primal(grad_output) * tangent(kept) * slope(k, f);
    set_tangent(grad_input, sum_of(of_grad, of_kept));
  }
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("activation(Tensor input, str activation) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("activation_backward(Tensor grad_output, Tensor kept, str activation) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("activation", activation_cpu_kernel);
  m.impl("activation_backward", activation_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("activation", activation_cuda_kernel);
  m.impl("activation_backward", activation_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("activation", activation_meta);
  m.impl("activation_backward", activation_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("activation", activation_autograd);
  m.impl("activation_backward", activation_backward_autograd);
}

}  // namespace warpwright
