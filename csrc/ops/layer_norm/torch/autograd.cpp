// Autograd of layer_norm, rms_norm and their backwards.
//
// With g = dy * weight, xhat = (x - mean) * rstd and, per row,
//   P(v) = v - mean(v) - xhat * mean(v * xhat)      (rms_norm: without mean(v))
// the backward is dx = rstd * P(g), dweight = sum(dy * xhat), dbias = sum(dy). P is self-adjoint,
// and the change of xhat along a change t of x is rstd * P(t).
#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/zeros_like.h>

#include "ops/layer_norm/torch/common.h"

namespace warpwright {
namespace {

// The quantities of one call in the type of its statistics, in differentiable tensor operations.
class Normalized {
 public:
  // An undefined mean: rms_norm.
  Normalized(const Tensor& input, SymIntArrayRef shape, const Tensor& weight, const Tensor& mean,
             const Tensor& rstd)
      : centered_(mean.defined()), type_(rstd.scalar_type()) {
    for (int64_t d = 0; d < input.dim(); ++d) {
      (d < input.dim() - static_cast<int64_t>(shape.size()) ? leading_ : along_).push_back(d);
    }
    weight_ = weight.defined() ? weight.to(type_) : Tensor();
    const Tensor x = input.to(type_);
    // An outer level of torch.func may differentiate by x, though this level does not.
    constexpr c10::DispatchKeySet kNested(
        {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
    if (needs_gradient(input) || input.key_set().has_any(kNested)) {
      // For one more derivative: the saved values, as functions of x.
      const Tensor distance = centered_ ? x - average(x) : x;
      const Tensor square = average(distance * distance);
      rstd_ = (square - square.detach() + rstd.pow(-2)).rsqrt();
      xhat_ = distance * rstd_;
    } else {
      rstd_ = rstd;
      xhat_ = (centered_ ? x - mean : x) * rstd_;
    }
  }

  Tensor average(const Tensor& value) const { return value.mean(along_, /*keepdim=*/true); }
  Tensor sum(const Tensor& value) const { return leading_.empty() ? value : value.sum(leading_); }
  Tensor project(const Tensor& v) const {
    const Tensor rest = v - xhat_ * average(v * xhat_);
    return centered_ ? rest - average(v) : rest;
  }
  Tensor scaled(const Tensor& v) const { return weight_.defined() ? v * weight_ : v; }
  // The output's change along changes of input, weight and bias; undefined: none.
  Tensor along(const Tensor& v, const Tensor& v_weight, const Tensor& v_bias) const {
    Tensor result;
    if (v.defined()) result = scaled(rstd_ * project(v.to(type_)));
    if (v_weight.defined()) result = sum_of(result, xhat_ * v_weight.to(type_));
    if (v_bias.defined()) {
      result =
          result.defined() ? result + v_bias.to(type_) : at::zeros_like(xhat_) + v_bias.to(type_);
    }
    return result;
  }

  const Tensor& xhat() const { return xhat_; }
  const Tensor& rstd() const { return rstd_; }
  at::ScalarType type() const { return type_; }

 private:
  bool centered_;
  at::ScalarType type_;
  c10::SmallVector<int64_t, 5> leading_, along_;  // dimensions
  Tensor weight_, rstd_, xhat_;
};

Tensor tangent_or_undefined(const Tensor& t) { return has_tangent(t) ? tangent(t) : Tensor(); }
Tensor primal_or_undefined(const Tensor& t) { return t.defined() ? primal(t) : t; }

Tensor in_type_of(const Tensor& value, const Tensor& like) {
  return value.defined() ? value.to(like.scalar_type()) : value;
}

struct NormAttributes {
  std::vector<c10::SymInt> shape;
};

struct LayerNormBackward {  // saved: input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightLayerNormBackward";
  using Attributes = NormAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] = call_backward(grads[0], saved[0], a.shape, optional_if_defined(saved[1]),
                                      saved[2], saved[3], {needs[0], needs[1], needs[2]});
    return {dx, dw, db};
  }
};
struct RmsNormBackward : LayerNormBackward {
  static constexpr const char* kName = "WarpwrightRMSNormBackward";
};

// The gradient of <v, dx> + <v_weight, dweight> + <v_bias, dbias>.
struct LayerNormBackwardBackward {  // saved: grad_output, input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightLayerNormBackwardBackward";
  using Attributes = NormAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    const Tensor &v = grads[0], &v_weight = grads[1],
                 v_bias = grads.size() > 2 ? grads[2] : Tensor();
    const Normalized norm(input, a.shape, weight, saved[3], saved[4]);
    Tensor for_grad_output, for_input, for_weight;
    if (needs[0]) {
      for_grad_output = in_type_of(norm.along(v, v_weight, v_bias), grad_output);
    }
    const Tensor dy = grad_output.to(norm.type());
    const Tensor direction = in_type_of(v, norm.rstd());
    if (needs[2] && direction.defined()) {
      for_weight = in_type_of(norm.sum(norm.rstd() * norm.project(direction) * dy), weight);
    }
    if (!needs[1]) return {for_grad_output, for_input, for_weight};
    // Through xhat in dweight, through xhat in P, and through rstd.
    Tensor for_xhat = v_weight.defined() ? dy * v_weight.to(norm.type()) : Tensor(), result;
    if (direction.defined()) {
      const Tensor g = norm.scaled(dy);
      const Tensor in_projection = norm.rstd() * (direction * norm.average(g * norm.xhat()) +
                                                  g * norm.average(direction * norm.xhat()));
      for_xhat = sum_of(for_xhat, -in_projection);
      result = -norm.xhat() * norm.rstd() * norm.rstd() * norm.average(direction * norm.project(g));
    }
    if (for_xhat.defined()) result = sum_of(result, norm.rstd() * norm.project(for_xhat));
    return {for_grad_output, in_type_of(result, input), for_weight};
  }
};
struct RmsNormBackwardBackward : LayerNormBackwardBackward {
  static constexpr const char* kName = "WarpwrightRMSNormBackwardBackward";
};

// The changes of (dx, dweight, dbias) along the tangents; undefined where zero.
Tensors3 backward_tangents(const Tensor& grad_output, const Tensor& input, SymIntArrayRef shape,
                           const Tensor& weight, const Tensor& mean, const Tensor& rstd) {
  const Tensor x = primal(input), w = primal_or_undefined(weight);
  const Normalized norm(x, shape, w, mean, rstd);
  const Tensor dy = primal(grad_output).to(norm.type());
  const Tensor dy_t = in_type_of(tangent_or_undefined(grad_output), rstd),
               x_t = in_type_of(tangent_or_undefined(input), rstd),
               w_t = in_type_of(tangent_or_undefined(weight), rstd);
  Tensor dx_t, dw_t, db_t;
  // dx is linear in g = dy * weight.
  Tensor g_t = dy_t.defined() ? norm.scaled(dy_t) : Tensor();
  if (w_t.defined()) g_t = sum_of(g_t, dy * w_t);
  if (g_t.defined()) dx_t = norm.rstd() * norm.project(g_t);
  if (dy_t.defined()) {
    dw_t = norm.sum(dy_t * norm.xhat());
    db_t = norm.sum(dy_t);
  }
  if (x_t.defined()) {
    const Tensor g = norm.scaled(dy);
    const Tensor xhat_t = norm.rstd() * norm.project(x_t);
    dw_t = sum_of(dw_t, norm.sum(dy * xhat_t));
    const Tensor rstd_t = -norm.rstd() * norm.rstd() * norm.average(norm.xhat() * x_t);
    dx_t = sum_of(
        dx_t, rstd_t * norm.project(g) - norm.rstd() * (xhat_t * norm.average(g * norm.xhat()) +
                                                        norm.xhat() * norm.average(g * xhat_t)));
  }
  const Tensor& like = weight.defined() ? weight : rstd;
  return {in_type_of(dx_t, input), in_type_of(dw_t, like), in_type_of(db_t, like)};
}

// ---- Autograd ----

// Output, mean and rstd of `forward`, with history and tangent.
template <class Spec, class Forward>
Tensors3 forward_autograd(const Tensor& input, SymIntArrayRef shape, const Tensor& weight,
                          const Tensor& bias, Forward&& forward) {
  auto node = make_node<Spec>({shape.vec()}, input, weight, bias);
  auto [output, mean, rstd] = below_autograd(forward);
  if (node) {
    for (const Tensor& saved : {input, weight, mean, rstd}) node->save(saved);
    set_history(output, node);
  }
  if (any_tangent(input, weight, bias)) {
    const Tensor w = primal_or_undefined(weight);
    const Normalized norm(primal(input), shape, w, mean, rstd);
    const Tensor direction = norm.along(tangent_or_undefined(input), tangent_or_undefined(weight),
                                        tangent_or_undefined(bias));
    set_tangent(output, tangent_with_zero_terms(in_type_of(direction, output), input, weight));
  }
  return {output, mean, rstd};
}

Tensors3 layer_norm_autograd(const Tensor& input, SymIntArrayRef shape,
                             const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                             OptionalType dtype) {
  return forward_autograd<LayerNormBackward>(
      input, shape, value_or_undefined(weight), value_or_undefined(bias),
      [&] { return call_layer_norm(input, shape, weight, bias, eps, dtype); });
}

Tensors2 rms_norm_autograd(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                           std::optional<double> eps, OptionalType dtype) {
  auto [output, mean, rstd] =
      forward_autograd<RmsNormBackward>(input, shape, value_or_undefined(weight), Tensor(), [&] {
        auto [y, r] = call_rms_norm(input, shape, weight, eps, dtype);
        return Tensors3{y, Tensor(), r};
      });
  return {output, rstd};
}

// (dx, dweight, dbias); rms_norm's mean and dbias are undefined.
template <class Spec>
Tensors3 backward_autograd(const Tensor& grad_output, const Tensor& input, SymIntArrayRef shape,
                           const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                           std::array<bool, 3> wanted) {
  const bool centered = mean.defined();
  const char* op = centered ? "layer_norm_backward" : "rms_norm_backward";
  if (centered) check_constant(mean, op, "mean");
  check_constant(rstd, op, "rstd");
  const Tensor w = value_or_undefined(weight);
  auto node = make_node<Spec>({shape.vec()}, grad_output, input, w);
  auto [dx, dw, db] = below_autograd(
      [&] { return call_backward(grad_output, input, shape, weight, mean, rstd, wanted); });
  if (node) {
    for (const Tensor& saved : {grad_output, input, w, mean, rstd}) node->save(saved);
    if (centered) {
      set_history({dx, dw, db}, node);
    } else {
      set_history({dx, dw}, node);
    }
  }
  if (any_tangent(grad_output, input, w)) {
    const auto [dx_t, dw_t, db_t] = backward_tangents(grad_output, input, shape, w, mean, rstd);
    if (dx.defined() && dx_t.defined()) set_tangent(dx, dx_t);
    if (dw.defined() && dw_t.defined()) set_tangent(dw, dw_t);
    if (db.defined() && db_t.defined()) set_tangent(db, db_t);
  }
  return {dx, dw, db};
}

Tensors3 layer_norm_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                      SymIntArrayRef shape, const OptionalTensor& weight,
                                      const Tensor& mean, const Tensor& rstd,
                                      std::array<bool, 3> wanted) {
  return backward_autograd<LayerNormBackwardBackward>(grad_output, input, shape, weight, mean, rstd,
                                                      wanted);
}
Tensors2 rms_norm_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                    SymIntArrayRef shape, const OptionalTensor& weight,
                                    const Tensor& rstd, std::array<bool, 2> wanted) {
  auto [dx, dw, db] = backward_autograd<RmsNormBackwardBackward>(
      grad_output, input, shape, weight, Tensor(), rstd, {wanted[0], wanted[1], false});
  return {dx, dw};
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("layer_norm", layer_norm_autograd);
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("layer_norm_backward", layer_norm_backward_autograd);
  m.impl("rms_norm_backward", rms_norm_backward_autograd);
}

}  // namespace warpwright
