// Autograd and Autocast of add_layer_norm, add_rms_norm and their backwards, and of
// norm_with_residual: a norm that also returns its input, for the residual branch.
//
// The sum's gradient is that of the norm plus its own; both addends get it. Higher derivatives run
// the addition and the norm as two ops, which have all derivatives.
#include <ATen/autocast_mode.h>
#include <ATen/ops/alias.h>

#include "ops/layer_norm/torch/common.h"
#include "torch/plain.h"

namespace warpwright {
namespace {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Mask3 = std::array<bool, 3>;
using Mask4 = std::array<bool, 4>;

// ---- the ops through the dispatcher ----

Tensors4 call_add_layer_norm(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                             const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                             OptionalType dtype) {
  static const auto op =
      find_op<Tensors4(const Tensor&, const Tensor&, SymIntArrayRef, const OptionalTensor&,
                       const OptionalTensor&, double, OptionalType)>("warpwright::add_layer_norm");
  return op.call(input, residual, shape, weight, bias, eps, dtype);
}

// The mean is undefined.
Tensors4 call_add_rms_norm(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                           const OptionalTensor& weight, std::optional<double> eps,
                           OptionalType dtype) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, SymIntArrayRef, const OptionalTensor&,
                       std::optional<double>, OptionalType)>("warpwright::add_rms_norm");
  auto [sum, output, rstd] = op.call(input, residual, shape, weight, eps, dtype);
  return {sum, output, Tensor(), rstd};
}

// For both ops; an undefined mean: add_rms_norm.
Tensors4 call_add_backward(const Tensor& grad_sum, const Tensor& grad_output, const Tensor& sum,
                           SymIntArrayRef shape, const OptionalTensor& weight, const Tensor& mean,
                           const Tensor& rstd, at::ScalarType dtype, Mask4 wanted) {
  if (!mean.defined()) {
    static const auto op =
        find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef,
                         const OptionalTensor&, const Tensor&, at::ScalarType, Mask3)>(
            "warpwright::add_rms_norm_backward");
    auto [dx, copy, dw] = op.call(grad_sum, grad_output, sum, shape, weight, rstd, dtype,
                                  {wanted[0], wanted[1], wanted[2]});
    return {dx, copy, dw, Tensor()};
  }
  static const auto op =
      find_op<Tensors4(const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef,
                       const OptionalTensor&, const Tensor&, const Tensor&, at::ScalarType, Mask4)>(
          "warpwright::add_layer_norm_backward");
  return op.call(grad_sum, grad_output, sum, shape, weight, mean, rstd, dtype, wanted);
}

// ---- forward ----

struct AddNormAttributes {
  std::vector<c10::SymInt> shape;
  at::ScalarType dtype;  // of `input`
};

Tensor in_type(const Tensor& value, at::ScalarType type) {
  return value.defined() ? value.to(type) : value;
}

struct AddLayerNormBackward {  // saved: sum, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightAddLayerNormBackward";
  static constexpr const char* kInput = "add_layer_norm: input";
  static constexpr const char* kResidual = "add_layer_norm: residual";
  using Attributes = AddNormAttributes;
  // needs: input, residual, weight, bias
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &sum = saved[0], &mean = saved[2], &rstd = saved[3];
    const auto weight = optional_if_defined(saved[1]);
    Tensor dx = grads[0], copy, dw, db;
    if (grads[0].defined() && grads[1].defined()) {
      std::tie(dx, copy, dw, db) =
          call_add_backward(grads[0], grads[1], sum, a.shape, weight, mean, rstd, a.dtype,
                            {needs[1], needs[0], needs[2], needs[3]});
    } else if (grads[1].defined()) {
      std::tie(dx, dw, db) = call_backward(grads[1], sum, a.shape, weight, mean, rstd,
                                           {needs[0] || needs[1], needs[2], needs[3]});
    }
    if (!copy.defined() && needs[0]) copy = in_type(dx, a.dtype);
    return {copy, needs[1] ? dx : Tensor(), dw, db};
  }
};
struct AddRmsNormBackward : AddLayerNormBackward {
  static constexpr const char* kName = "WarpwrightAddRMSNormBackward";
  static constexpr const char* kInput = "add_rms_norm: input";
  static constexpr const char* kResidual = "add_rms_norm: residual";
};

// `together` runs the op, and `apart` the norm of a sum.
template <class Spec, class Together, class Apart>
Tensors4 add_forward_autograd(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                              const Tensor& weight, const Tensor& bias, Together&& together,
                              Apart&& apart) {
  // Apart if the norm alone is differentiated: the sum then has no history.
  const bool has_constant_sum = !needs_gradient(input) && !needs_gradient(residual) &&
                                (needs_gradient(weight) || needs_gradient(bias));
  if (has_constant_sum || any_tangent(input, residual, weight, bias)) {
    check_plain_storage(input, Spec::kInput);
    check_plain_storage(residual, Spec::kResidual);
    const Tensor sum = residual + input;
    auto [output, mean, rstd] = apart(sum);
    return {sum, output, mean, rstd};
  }
  auto node = make_node<Spec>({shape.vec(), input.scalar_type()}, input, residual, weight, bias);
  auto [sum, output, mean, rstd] = below_autograd(together);
  if (node) {
    set_history({sum, output}, node);
    node->save_output(sum);
    for (const Tensor& saved : {weight, mean, rstd}) node->save(saved);
  }
  return {sum, output, mean, rstd};
}

Tensors4 add_layer_norm_autograd(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 double eps, OptionalType dtype) {
  return add_forward_autograd<AddLayerNormBackward>(
      input, residual, shape, value_or_undefined(weight), value_or_undefined(bias),
      [&] { return call_add_layer_norm(input, residual, shape, weight, bias, eps, dtype); },
      [&](const Tensor& sum) { return call_layer_norm(sum, shape, weight, bias, eps, dtype); });
}

Tensors3 add_rms_norm_autograd(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                               const OptionalTensor& weight, std::optional<double> eps,
                               OptionalType dtype) {
  auto [sum, output, mean, rstd] = add_forward_autograd<AddRmsNormBackward>(
      input, residual, shape, value_or_undefined(weight), Tensor(),
      [&] { return call_add_rms_norm(input, residual, shape, weight, eps, dtype); },
      [&](const Tensor& total) {
        auto [y, r] = call_rms_norm(total, shape, weight, eps, dtype);
        return Tensors3{y, Tensor(), r};
      });
  return {sum, output, rstd};
}

// ---- backward ----

Tensors4 add_backward_autograd(const Tensor& grad_sum, const Tensor& grad_output, const Tensor& sum,
                               SymIntArrayRef shape, const OptionalTensor& weight,
                               const Tensor& mean, const Tensor& rstd, at::ScalarType dtype,
                               Mask4 wanted) {
  const Tensor w = value_or_undefined(weight);
  if (!is_differentiated(grad_sum) && !is_differentiated(grad_output) && !is_differentiated(sum) &&
      !is_differentiated(w)) {
    return below_autograd([&] {
      return call_add_backward(grad_sum, grad_output, sum, shape, weight, mean, rstd, dtype,
                               wanted);
    });
  }
  check_branch_type(dtype, sum, /*centered=*/mean.defined());
  const bool any = wanted[0] || wanted[1];
  auto [dx, dw, db] =
      call_backward(grad_output, sum, shape, weight, mean, rstd, {any, wanted[2], wanted[3]});
  if (any) dx = dx + grad_sum;
  const bool copies = wanted[1] && dtype != sum.scalar_type();
  return {dx, copies ? dx.to(dtype) : Tensor(), dw, db};
}

Tensors3 add_rms_norm_backward_autograd(const Tensor& grad_sum, const Tensor& grad_output,
                                        const Tensor& sum, SymIntArrayRef shape,
                                        const OptionalTensor& weight, const Tensor& rstd,
                                        at::ScalarType dtype, Mask3 wanted) {
  auto [dx, copy, dw, db] =
      add_backward_autograd(grad_sum, grad_output, sum, shape, weight, Tensor(), rstd, dtype,
                            {wanted[0], wanted[1], wanted[2], false});
  return {dx, copy, dw};
}

// ---- norm_with_residual ----

// A residual block begins with y = norm(x) and ends with x + f(y). As two readers of x, the engine
// would add their gradients in a pass of its own. Here one node has both readers, so the norm's
// backward adds the other gradient on its way.
struct NormWithResidualBackward {  // saved: input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightNormWithResidualBackward";
  struct Attributes {
    std::vector<c10::SymInt> shape;
  };
  // grads: of the residual and of the output. needs: input, weight, bias
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &input = saved[0], &mean = saved[2], &rstd = saved[3];
    const auto weight = optional_if_defined(saved[1]);
    if (!grads[1].defined()) return {grads[0], Tensor(), Tensor()};
    if (!grads[0].defined() || !needs[0]) {
      auto [dx, dw, db] = call_backward(grads[1], input, a.shape, weight, mean, rstd,
                                        {needs[0], needs[1], needs[2]});
      return {dx, dw, db};
    }
    auto [dx, copy, dw, db] =
        call_add_backward(grads[0], grads[1], input, a.shape, weight, mean, rstd,
                          input.scalar_type(), {true, false, needs[1], needs[2]});
    return {dx, dw, db};
  }
};

// `residual` is `input` in a tensor of its own, over the same memory.
Tensors2 norm_with_residual(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                            const OptionalTensor& bias, std::optional<double> eps, bool centered,
                            OptionalType dtype) {
  TORCH_CHECK(!centered || eps, "norm_with_residual: eps: expected a number, got None");
  auto norm = [&]() -> Tensors3 {
    if (centered) return call_layer_norm(input, shape, weight, bias, *eps, dtype);
    auto [output, rstd] = call_rms_norm(input, shape, weight, eps, dtype);
    return {output, Tensor(), rstd};
  };
  const Tensor w = value_or_undefined(weight), b = value_or_undefined(bias);
  if (!is_plain(input) || !is_plain_or_none(w) || !is_plain_or_none(b) || !needs_gradient(input)) {
    return {at::alias(input), std::get<0>(norm())};
  }
  auto node = make_node<NormWithResidualBackward>({shape.vec()}, input, w, b);
  Tensor residual = below_autograd([&] { return at::alias(input); });
  // A write to either is a write to both.
  torch::autograd::impl::set_version_counter(residual,
                                             torch::autograd::impl::version_counter(input));
  auto [output, mean, rstd] = below_autograd(norm);
  for (const Tensor& saved : {input, w, mean, rstd}) node->save(saved);
  set_history({residual, output}, node);
  return {residual, output};
}

// ---- Autocast: as an addition, which keeps its types, and layer_norm ----

Tensors4 add_layer_norm_autocast(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 double eps, OptionalType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  auto cast = [](const auto& value) { return at::autocast::cached_cast(at::kFloat, value); };
  const auto type = residual.scalar_type();
  if (type == at::kFloat || type == at::kDouble || dtype == type) {
    return call_add_layer_norm(input, residual, shape, cast(weight), cast(bias), eps, dtype);
  }
  // The norm of a 16-bit sum is float32.
  const Tensor sum = residual + input;
  auto [output, mean, rstd] =
      call_layer_norm(cast(sum), shape, cast(weight), cast(bias), eps, dtype);
  return {sum, output, mean, rstd};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "norm_with_residual(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float? eps, bool centered, ScalarType? dtype=None) -> (Tensor residual, Tensor output)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("norm_with_residual", norm_with_residual);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("add_layer_norm", add_layer_norm_autograd);
  m.impl("add_rms_norm", add_rms_norm_autograd);
  m.impl("add_layer_norm_backward", add_backward_autograd);
  m.impl("add_rms_norm_backward", add_rms_norm_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("add_layer_norm", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("add_layer_norm", add_layer_norm_autocast);
}

}  // namespace warpwright
