// linear_int8 and linear_fp8: x is quantised as it comes, then the product of codes. Both are
// composed of quantize_rows and scaled_linear on every device.
// The derivative passes through the quantisation of x as through the identity ("straight-through"):
// dx = (dy * weight_scale) codes, a plain product in x's type. Codes and scales have none.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

#include "ops/linear_8bit/torch/common.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/check_saved.h"

namespace warpwright {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;

namespace call {

Tensor linear_int8(const Tensor& input, const Tensor& weight, const Tensor& weight_scale,
                   const OptionalTensor& bias, bool per_tensor) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, bool)>(
          "warpwright::linear_int8");
  return op.call(input, weight, weight_scale, bias, per_tensor);
}

Tensor linear_fp8(const Tensor& input, const Tensor& weight, const Tensor& weight_scale,
                  const OptionalTensor& bias, bool per_tensor, bool use_fast_accum) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, bool,
                     bool)>("warpwright::linear_fp8");
  return op.call(input, weight, weight_scale, bias, per_tensor, use_fast_accum);
}

Tensor linear(const Tensor& input, const Tensor& weight) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("warpwright::linear");
  return op.call(input, weight, {});
}

Gradients linear_backward(const Tensor& grad_output, const OptionalTensor& weight, Mask mask) {
  static const auto op =
      find_op<Gradients(const Tensor&, const OptionalTensor&, const OptionalTensor&, Mask, Mask)>(
          "warpwright::linear_backward");
  return op.call(grad_output, {}, weight, mask, {false, false, false});
}

}  // namespace call

struct QuantizedLinear {
  const Tensor& input;
  const Tensor& weight;
  const Tensor& weight_scale;
  const OptionalTensor& bias;
  bool per_tensor;
  bool use_fast_accum;
  bool int8;  // linear_int8, else linear_fp8

  const char* name() const { return int8 ? "linear_int8" : "linear_fp8"; }
  Tensor dispatch(const Tensor& x, const OptionalTensor& b) const {
    return int8 ? call::linear_int8(x, weight, weight_scale, b, per_tensor)
                : call::linear_fp8(x, weight, weight_scale, b, per_tensor, use_fast_accum);
  }
};

// ---- checks ----

void check(const QuantizedLinear& q) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_quantizable(q.input.scalar_type()), q.name(),
                              ": input: expected float32, bfloat16 or float16, got ",
                              q.input.scalar_type());
  TORCH_CHECK(q.input.dim() >= 1, q.name(), ": input: expected at least 1D, got 0D");
  const auto type = q.weight.scalar_type();
  const bool fits = q.int8 ? type == at::kChar : type == at::kFloat8_e4m3fn;
  TORCH_CHECK(fits, q.name(), ": weight: expected codes of ", q.int8 ? "int8" : "float8_e4m3fn",
              ", got ", type);
  TORCH_CHECK(q.weight.dim() == 2, q.name(), ": weight: expected a matrix, got ", q.weight.dim(),
              "D");
  check_same_device(q.weight, q.input, (std::string(q.name()) + ": weight").c_str());
  TORCH_CHECK(q.input.sym_size(-1) == q.weight.sym_size(1), q.name(), ": input: expected ",
              q.weight.sym_size(1), " features, got ", q.input.sym_size(-1));
  TORCH_CHECK(q.weight_scale.defined(), q.name(), ": weight_scale: expected a tensor, got None");
  check_scale(q.weight_scale, (std::string(q.name()) + ": weight_scale").c_str(),
              q.weight.sym_size(0), q.input);
  if (!is_given(q.bias)) return;
  const auto bias_type = q.bias->scalar_type();
  TORCH_CHECK(bias_type == q.input.scalar_type() || bias_type == at::kFloat, q.name(),
              ": bias: expected ", q.input.scalar_type(), " or float32, got ", bias_type);
  check_argument(*q.bias, (std::string(q.name()) + ": bias").c_str(), {q.weight.sym_size(0)},
                 bias_type, q.input);
}

// ---- every device ----

Tensor forward(const QuantizedLinear& q) {
  check(q);
  const auto [codes, scale] =
      codes_ops::quantize_rows(q.input, q.weight.scalar_type(), q.per_tensor);
  return codes_ops::scaled_linear(codes, scale, q.weight, q.weight_scale, q.bias,
                                  q.input.scalar_type(), q.use_fast_accum);
}

// ---- Autograd ----

// x W^T as a function of x alone: the scales multiply the product's result, or dy before it.
Tensor times_scale(const Tensor& outputs, const Tensor& weight_scale) {
  const auto scale =
      weight_scale.sym_numel() == 1 ? weight_scale.reshape({}) : weight_scale.reshape({-1});
  return outputs.mul(scale).to(outputs.scalar_type());
}

struct QuantizedLinearBackward {  // saved: weight, weight_scale
  static constexpr const char* kName = "WarpwrightQuantizedLinearBackward";
  struct Attributes {
    at::ScalarType bias_type;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor& dy = grads[0];
    variable_list result(2);
    if (needs[0]) {
      check_saved_storage(saved, kName);
      const Tensor weight = saved[0].to(dy.scalar_type());
      result[0] = std::get<0>(
          call::linear_backward(times_scale(dy, saved[1]), weight, {true, false, false}));
    }
    if (needs[1]) {
      result[1] = std::get<2>(call::linear_backward(dy, {}, {false, false, true})).to(a.bias_type);
    }
    return result;
  }
};

Tensor differentiable(const QuantizedLinear& q) {
  check(q);
  check_constant(q.weight, q.name(), "weight");
  check_constant(q.weight_scale, q.name(), "weight_scale");
  const Tensor bias = value_or_undefined(q.bias);
  auto node = make_node<QuantizedLinearBackward>({bias.defined() ? bias.scalar_type() : at::kFloat},
                                                 q.input, bias);
  Tensor output = below_autograd([&] { return q.dispatch(q.input, q.bias); });
  if (node) {
    const bool through = q.input.requires_grad();
    node->save(through ? q.weight : Tensor());
    node->save(through ? q.weight_scale : Tensor());
    set_history(output, node);
  }
  if (any_tangent(q.input, bias)) {
    Tensor direction;
    if (has_tangent(q.input)) {
      const auto type = q.input.scalar_type();
      direction = times_scale(call::linear(tangent(q.input), q.weight.to(type)), q.weight_scale);
    }
    if (has_tangent(bias)) {
      const Tensor of_bias = tangent(bias).to(output.scalar_type());
      direction = direction.defined() ? direction.add(of_bias)
                                      : of_bias.expand_symint(output.sym_sizes()).clone();
    }
    set_tangent(output, direction);
  }
  return output;
}

// ---- Autocast: x and the bias in the low-precision type, as linear's ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
Tensor autocast(const QuantizedLinear& q) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  auto cast = [&](const Tensor& tensor) {
    return at::autocast::cached_cast(type, tensor, kDevice);
  };
  return q.dispatch(cast(q.input), is_given(q.bias) ? cast(*q.bias) : q.bias);
}

// Each key's function, of either op.
template <Tensor (*kRun)(const QuantizedLinear&)>
Tensor int8_kernel(const Tensor& input, const Tensor& weight, const Tensor& weight_scale,
                   const OptionalTensor& bias, bool per_tensor) {
  return kRun({input, weight, weight_scale, bias, per_tensor, false, true});
}
template <Tensor (*kRun)(const QuantizedLinear&)>
Tensor fp8_kernel(const Tensor& input, const Tensor& weight, const Tensor& weight_scale,
                  const OptionalTensor& bias, bool per_tensor, bool use_fast_accum) {
  return kRun({input, weight, weight_scale, bias, per_tensor, use_fast_accum, false});
}

template <Tensor (*kRun)(const QuantizedLinear&)>
void register_both(torch::Library& m) {
  m.impl("linear_int8", int8_kernel<kRun>);
  m.impl("linear_fp8", fp8_kernel<kRun>);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "linear_int8(Tensor input, Tensor weight, Tensor weight_scale, Tensor? bias=None, "
      "bool per_tensor=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_fp8(Tensor input, Tensor weight, Tensor weight_scale, Tensor? bias=None, "
      "bool per_tensor=False, bool use_fast_accum=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { register_both<forward>(m); }
#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { register_both<forward>(m); }
#endif
TORCH_LIBRARY_IMPL(warpwright, Meta, m) { register_both<forward>(m); }
TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { register_both<differentiable>(m); }
TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  register_both<autocast<at::kCPU, c10::DispatchKey::AutocastCPU>>(m);
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  register_both<autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>>(m);
}

}  // namespace warpwright
