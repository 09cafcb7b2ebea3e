// cross_entropy as users call it, composed of the ops of cross_entropy/torch/ops.cpp. It has
// native's dtype rules, autocast, arguments beyond native's, and gradients that ATen computes
// (weight, softcap, and third order).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <tuple>

#include "ops/cross_entropy/torch/common.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

namespace warpwright {

// The double backward in differentiable ATen ops: third and higher derivatives come from here.
std::tuple<Tensor, Tensor, Tensor> differentiable_double_backward(
    const Tensor& v, const Tensor& u, const Tensor& grad_output, const Tensor& input,
    const Tensor& target, const Tensor& weight, const Tensor& total_weight,
    const LossOptions& options, std::array<bool, 3> output_mask) {
  const auto& [reduction, ignore_index, label_smoothing, z_loss, inplace] = options;
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
    // A bad label (a NaN row in the fused kernels) must not be used as an index here either.
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
  Tensor mass = wq.sum(dim, /*keepdim=*/true);
  Tensor z_mass;  // d mass / d logits is z_mass * prob
  if (z_loss != 0) {
    z_mass = at::full_like(mass, 2 * z_loss);
    if (valid.defined()) z_mass = z_mass * valid;
    mass = mass + z_mass * at::logsumexp(input.to(accum), {dim}, /*keepdim=*/true);
  }
  const bool is_mean = reduction == at::Reduction::Mean;
  Tensor grad = grad_output.to(accum);
  if (reduction == at::Reduction::None) {
    grad = input.dim() == 1 ? grad.reshape({1}) : grad.unsqueeze(dim);
  }
  if (is_mean) grad = grad / total_weight;
  // An ignored row has no gradient, even if a mean divides by 0.
  if (valid.defined()) grad = grad.masked_fill(valid.logical_not(), 0);

  const Tensor v_or_zero = v.defined() ? v.to(accum) : at::zeros_like(log_p);
  const Tensor wu = w * (u.defined() && probabilities ? u.to(accum) : at::zeros_like(log_p));
  const Tensor pv = (prob * v_or_zero).sum(dim, true);

  Tensor grad_grad_output, grad_input, grad_target;
  if (output_mask[0]) {
    const Tensor per_row =
        (mass * pv).squeeze(dim) - (wq * v_or_zero).sum(dim) - keep * (wu * log_p).sum(dim);
    grad_grad_output = reduction == at::Reduction::None ? per_row : per_row.sum();
    if (is_mean) grad_grad_output = grad_grad_output / total_weight;
    grad_grad_output = grad_grad_output.to(grad_output.scalar_type()).view_as(grad_output);
  }
  if (output_mask[1]) {
    Tensor curvature = mass * (v_or_zero - pv);
    if (z_mass.defined()) curvature = curvature + z_mass * pv;
    grad_input = grad * (prob * curvature - keep * (wu - prob * wu.sum(dim, /*keepdim=*/true)));
    grad_input = grad_input.to(input.scalar_type());
  }
  if (output_mask[2] && probabilities) {
    grad_target = (grad * keep * w * (pv - v_or_zero)).to(target.scalar_type());
  }
  return {grad_grad_output, grad_input, grad_target};
}

namespace {

Tensor3 call_forward(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     const LossOptions& options, ScalarType dtype) {
  static const auto op =
      find_op<Tensor3(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double,
                      ScalarType, double, bool)>("warpwright::cross_entropy_forward");
  return op.call(input, target, weight, options.reduction, options.ignore_index,
                 options.label_smoothing, dtype, options.z_loss, options.inplace_backward);
}

Tensor call_lse(const Tensor& input, const Tensor& row_stats) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&)>("warpwright::cross_entropy_lse");
  return op.call(input, row_stats);
}

// ---- what users call, and Autocast ----

// What cross_entropy_extras() offers beyond native's arguments.
struct Extras {
  double softcap = 0;
  bool lse = false;
  bool argmax = false;
};

// Native's dtype rules: labels need weights of the logits' type; probabilities promote. Under
// autocast 16-bit operands count as float32, but the kernels read them unconverted.
Tensor3 cross_entropy_as(const Tensor& input, const Tensor& target, const OptionalTensor& weight_,
                         const LossOptions& options, bool autocast, const Extras& extras) {
  check_cross_entropy_dtypes(input, target);
  const Tensor weight = value_or_undefined(weight_);
  check_plain_storage(input, "cross_entropy: input");
  check_plain_storage(target, "cross_entropy: target");
  check_plain_storage(weight, "cross_entropy: weight");
  auto counted = [&](const Tensor& tensor) {
    const ScalarType type = tensor.scalar_type();
    return autocast && (type == at::kHalf || type == at::kBFloat16) ? at::kFloat : type;
  };
  ScalarType dtype = counted(input);
  auto run = [&](const Tensor& logits, const Tensor& q, const OptionalTensor& w,
                 double smoothing) -> Tensor3 {
    Tensor z = logits, target_as_read = q;
    ScalarType run_dtype = dtype;
    if (extras.softcap != 0) {
      // In the accumulator's type: rounding a cap to 16 bits would be visible.
      z = at::tanh(z.to(accum_type(z.scalar_type())) / extras.softcap) * extras.softcap;
      run_dtype = z.scalar_type();
      if (is_probabilities(z, q)) target_as_read = q.to(run_dtype);
    }
    LossOptions run_options = options;
    run_options.label_smoothing = smoothing;
    auto [loss, row_stats, total_weight] =
        call_forward(z, target_as_read, w, run_options, run_dtype);
    return {loss.to(dtype), extras.lse ? call_lse(z, row_stats) : Tensor(),
            extras.argmax ? input.detach().argmax(class_dim(input)) : Tensor()};
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
    return run(input, target, weight_, options.label_smoothing);
  }

  dtype = c10::promoteTypes(dtype, counted(target));
  if (weight.defined()) dtype = c10::promoteTypes(dtype, counted(weight));
  const bool read_as_is = dtype != at::kDouble;
  const Tensor z = read_as_is ? input : input.to(dtype);
  Tensor q =
      target.scalar_type() == z.scalar_type() ? target : target.to(accum_type(z.scalar_type()));
  if (!weight_differs) return run(z, q, weight_, options.label_smoothing);
  // The loss is linear in weight * probabilities, so ATen's chain rule serves for weight.
  check_cross_entropy(input, target, weight, options);
  const double smoothing = options.label_smoothing > 0 ? options.label_smoothing : 0;
  q = q.to(accum_type(z.scalar_type()));
  if (smoothing > 0) q = q * (1 - smoothing) + smoothing / input.size(class_dim(input));
  c10::SmallVector<int64_t, 6> broadcast(input.dim(), 1);
  broadcast[class_dim(input)] = -1;
  return run(z, q * weight.to(q.scalar_type()).view(broadcast), std::nullopt, 0);
}

Tensor cross_entropy_composite(const Tensor& input, const Tensor& target,
                               const OptionalTensor& weight, int64_t reduction, SymInt ignore_index,
                               double label_smoothing) {
  return std::get<0>(cross_entropy_as(input, target, weight,
                                      {reduction, std::move(ignore_index), label_smoothing},
                                      /*autocast=*/false, {}));
}

Tensor3 cross_entropy_extras_as(const Tensor& input, const Tensor& target,
                                const OptionalTensor& weight, int64_t reduction,
                                SymInt ignore_index, double label_smoothing, double z_loss,
                                double softcap, bool return_lse, bool return_argmax,
                                bool inplace_backward, bool autocast) {
  TORCH_CHECK_VALUE(z_loss >= 0, "z_loss: expected a number of at least 0, got ", z_loss);
  TORCH_CHECK_VALUE(softcap >= 0, "softcap: expected a number of at least 0, got ", softcap);
  return cross_entropy_as(
      input, target, weight,
      {reduction, std::move(ignore_index), label_smoothing, z_loss, inplace_backward}, autocast,
      {softcap, return_lse, return_argmax});
}

Tensor3 cross_entropy_extras_composite(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight, int64_t reduction,
                                       SymInt ignore_index, double label_smoothing, double z_loss,
                                       double softcap, bool return_lse, bool return_argmax,
                                       bool inplace_backward) {
  return cross_entropy_extras_as(input, target, weight, reduction, std::move(ignore_index),
                                 label_smoothing, z_loss, softcap, return_lse, return_argmax,
                                 inplace_backward, /*autocast=*/false);
}

template <c10::DispatchKey kKey>
Tensor cross_entropy_autocast(const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, int64_t reduction, SymInt ignore_index,
                              double label_smoothing) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  return std::get<0>(cross_entropy_as(input, target, weight,
                                      {reduction, std::move(ignore_index), label_smoothing},
                                      /*autocast=*/true, {}));
}

template <c10::DispatchKey kKey>
Tensor3 cross_entropy_extras_autocast(const Tensor& input, const Tensor& target,
                                      const OptionalTensor& weight, int64_t reduction,
                                      SymInt ignore_index, double label_smoothing, double z_loss,
                                      double softcap, bool return_lse, bool return_argmax,
                                      bool inplace_backward) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  return cross_entropy_extras_as(input, target, weight, reduction, std::move(ignore_index),
                                 label_smoothing, z_loss, softcap, return_lse, return_argmax,
                                 inplace_backward, /*autocast=*/true);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "SymInt ignore_index=-100, float label_smoothing=0.0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_extras(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "SymInt ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float softcap=0.0, "
      "bool return_lse=False, bool return_argmax=False, bool inplace_backward=False) -> "
      "(Tensor loss, Tensor lse, Tensor argmax)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", cross_entropy_composite);
  m.impl("cross_entropy_extras", cross_entropy_extras_composite);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("cross_entropy", cross_entropy_autocast<c10::DispatchKey::AutocastCPU>);
  m.impl("cross_entropy_extras", cross_entropy_extras_autocast<c10::DispatchKey::AutocastCPU>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("cross_entropy", cross_entropy_autocast<c10::DispatchKey::AutocastCUDA>);
  m.impl("cross_entropy_extras", cross_entropy_extras_autocast<c10::DispatchKey::AutocastCUDA>);
}

}  // namespace warpwright
