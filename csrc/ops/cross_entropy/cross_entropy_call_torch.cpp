// cross_entropy as users call it, composed of the ops of cross_entropy_torch.cpp: native's dtype
// rules, autocast, and gradients that are ATen's business (weight, and third order).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <tuple>

#include "ops/cross_entropy/cross_entropy_torch.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

namespace warpwright {

using c10::SymInt;

// cross_entropy_torch.cpp
void check_cross_entropy_dtypes(const Tensor& input, const Tensor& target);
void check_cross_entropy(const Tensor& input, const Tensor& target, const Tensor& weight,
                         int64_t reduction, const SymInt& ignore_index, double label_smoothing);

// The double backward in differentiable ATen ops: third and higher derivatives come from here.
std::tuple<Tensor, Tensor, Tensor> differentiable_double_backward(
    const Tensor& v, const Tensor& u, const Tensor& grad_output, const Tensor& input,
    const Tensor& target, const Tensor& weight, const Tensor& total_weight, int64_t reduction,
    const SymInt& ignore_index, double label_smoothing, std::array<bool, 3> output_mask) {
  const int64_t dim = class_dim(input);
  const at::ScalarType accum = accum_type(input.scalar_type());
  const double smoothing = label_smoothing > 0 ? label_smoothing : 0, keep = 1 - smoothing;
  const SymInt classes = input.sym_size(dim);
  const bool probabilities = is_probabilities(input, target);
  const Tensor log_p = at::log_softmax(input.to(accum), dim);
  const Tensor prob = log_p.exp();

  Tensor q;
  Tensor valid;
  if (probabilities) {
    q = target.to(accum);
  } else {
    const Tensor labels = input.dim() == 1 ? target.reshape({}) : target;
    valid = labels.ne(ignore_index).unsqueeze(dim);
    // A bad label (NaN row in the fused kernels) must not index anything here either.
    const Tensor index =
        labels.to(at::kLong).unsqueeze(dim).clamp(0, (classes - 1).guard_int(__FILE__, __LINE__));
    q = at::zeros_like(log_p).scatter(dim, index, 1.0);
  }
  if (smoothing > 0) q = q * keep + smoothing / classes.guard_int(__FILE__, __LINE__);
  if (valid.defined()) q = q * valid;
  c10::SmallVector<int64_t, 6> broadcast(input.dim(), 1);
  broadcast[dim] = -1;
  const Tensor w =
      weight.defined() ? weight.to(accum).view(broadcast) : at::ones_like(total_weight);
  const Tensor wq = w * q;
  const Tensor mass = wq.sum(dim, /*keepdim=*/true);
  const Tensor scale =
      reduction == at::Reduction::Mean ? total_weight.reciprocal() : at::ones_like(total_weight);
  Tensor grad = grad_output.to(accum);
  if (reduction == at::Reduction::None) {
    grad = input.dim() == 1 ? grad.reshape({1}) : grad.unsqueeze(dim);
  }
  grad = grad * scale;

  const Tensor v_or_zero = v.defined() ? v.to(accum) : at::zeros_like(log_p);
  const Tensor wu = w * (u.defined() && probabilities ? u.to(accum) : at::zeros_like(log_p));
  const Tensor pv = (prob * v_or_zero).sum(dim, true);

  Tensor grad_grad_output, grad_input, grad_target;
  if (output_mask[0]) {
    const Tensor per_row =
        (mass * pv).squeeze(dim) - (wq * v_or_zero).sum(dim) - keep * (wu * log_p).sum(dim);
    grad_grad_output = (reduction == at::Reduction::None ? per_row : per_row.sum()) * scale;
    grad_grad_output = grad_grad_output.to(grad_output.scalar_type()).view_as(grad_output);
  }
  if (output_mask[1]) {
    grad_input = grad * (mass * prob * (v_or_zero - pv) -
                         keep * (wu - prob * wu.sum(dim, /*keepdim=*/true)));
    grad_input = grad_input.to(input.scalar_type());
  }
  if (output_mask[2] && probabilities) {
    grad_target = (grad * keep * w * (pv - v_or_zero)).to(target.scalar_type());
  }
  return {grad_grad_output, grad_input, grad_target};
}

namespace {

using at::ScalarType;
using OptionalTensor = std::optional<Tensor>;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;

Tensor3 call_forward(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t reduction, SymInt ignore_index, double label_smoothing,
                     ScalarType dtype) {
  static const auto op =
      find_op<Tensor3(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double,
                      ScalarType)>("warpwright::cross_entropy_forward");
  return op.call(input, target, weight, reduction, std::move(ignore_index), label_smoothing, dtype);
}

// ---- what users call, and Autocast ----

// Native's dtype rules: labels want the weights in the logits' type; probabilities promote. Under
// autocast 16-bit operands count as float32, but are read as they are.
Tensor cross_entropy_as(const Tensor& input, const Tensor& target, const OptionalTensor& weight_,
                        int64_t reduction, SymInt ignore_index, double label_smoothing,
                        bool autocast) {
  check_cross_entropy_dtypes(input, target);
  const Tensor weight = value_or_undefined(weight_);
  auto counted = [&](const Tensor& tensor) {
    const ScalarType type = tensor.scalar_type();
    return autocast && (type == at::kHalf || type == at::kBFloat16) ? at::kFloat : type;
  };
  ScalarType dtype = counted(input);
  auto run = [&](const Tensor& z, const Tensor& q, const OptionalTensor& w, double smoothing) {
    return std::get<0>(call_forward(z, q, w, reduction, std::move(ignore_index), smoothing, dtype));
  };
  const bool weight_differs =
      weight.defined() &&
      ((at::GradMode::is_enabled() && weight.requires_grad()) || has_tangent(weight));
  if (!is_probabilities(input, target)) {
    TORCH_CHECK(!weight_differs,
                "The function 'cross_entropy' is not differentiable with respect to argument "
                "'weight'. This input cannot have requires_grad True.");
    TORCH_CHECK(!weight.defined() || counted(weight) == dtype, "expected scalar type ", dtype,
                " but found ", counted(weight), " (weight)");
    return run(input, target, weight_, label_smoothing);
  }

  dtype = c10::promoteTypes(dtype, counted(target));
  if (weight.defined()) dtype = c10::promoteTypes(dtype, counted(weight));
  const bool read_as_is = dtype != at::kDouble;
  const Tensor z = read_as_is ? input : input.to(dtype);
  Tensor q =
      target.scalar_type() == z.scalar_type() ? target : target.to(accum_type(z.scalar_type()));
  if (!weight_differs) return run(z, q, weight_, label_smoothing);
  // The loss is linear in weight * probabilities: the chain rule for weight is ATen's.
  check_cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing);
  const double smoothing = label_smoothing > 0 ? label_smoothing : 0;
  q = q.to(accum_type(z.scalar_type()));
  if (smoothing > 0) q = q * (1 - smoothing) + smoothing / input.size(class_dim(input));
  c10::SmallVector<int64_t, 6> broadcast(input.dim(), 1);
  broadcast[class_dim(input)] = -1;
  return run(z, q * weight.to(q.scalar_type()).view(broadcast), std::nullopt, 0);
}

Tensor cross_entropy_composite(const Tensor& input, const Tensor& target,
                               const OptionalTensor& weight, int64_t reduction, SymInt ignore_index,
                               double label_smoothing) {
  return cross_entropy_as(input, target, weight, reduction, std::move(ignore_index),
                          label_smoothing, /*autocast=*/false);
}

template <c10::DispatchKey kKey>
Tensor cross_entropy_autocast(const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, int64_t reduction, SymInt ignore_index,
                              double label_smoothing) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  return cross_entropy_as(input, target, weight, reduction, std::move(ignore_index),
                          label_smoothing, /*autocast=*/true);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "SymInt ignore_index=-100, float label_smoothing=0.0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", cross_entropy_composite);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("cross_entropy", cross_entropy_autocast<c10::DispatchKey::AutocastCPU>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("cross_entropy", cross_entropy_autocast<c10::DispatchKey::AutocastCUDA>);
}

}  // namespace warpwright
