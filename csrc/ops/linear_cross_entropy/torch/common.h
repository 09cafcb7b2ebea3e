// Shared by the files of linear_cross_entropy: one call of its ops, and cross_entropy's ops on a
// call's logits.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>

#include <array>
#include <optional>
#include <tuple>

#include "ops/cross_entropy/torch/common.h"
#include "ops/linear/torch/common.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

namespace warpwright::linear_cross_entropy {

using linear_ops::Gradients;
// Loss, total_weight, the three gradients, lse, argmax.
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The options of a call; chunk_rows 0: choose_chunks() chooses.
struct Options {
  LossOptions loss;
  double softcap;
  int64_t chunk_rows;
};

// One call. Rows are folded: input (rows, features), weight (classes, features), bias (classes),
// target (rows) or (rows, classes), class_weight (classes).
struct Call : Options {
  Tensor input, weight, bias, target, class_weight;

  Call(const Tensor& input_, const Tensor& weight_, const OptionalTensor& bias_,
       const Tensor& target_, const OptionalTensor& class_weight_, Options options)
      : Options(std::move(options)),
        input(input_),
        weight(weight_),
        bias(value_or_undefined(bias_)),
        target(target_),
        class_weight(value_or_undefined(class_weight_)) {}

  bool is_mean() const { return loss.reduction == at::Reduction::Mean; }
  bool is_none() const { return loss.reduction == at::Reduction::None; }
};

// The type in which the forward computes the gradients of weight and bias. In float16, gradients of
// a mean may underflow until the backward multiplies them by the loss scale. Gradients of a sum may
// overflow. The forward therefore keeps the sum's gradients in float32, and the backward divides.
inline ScalarType stored_type(ScalarType type) { return type == at::kHalf ? at::kFloat : type; }
inline bool divides_late(const Call& c) {
  return c.input.scalar_type() == at::kHalf && c.is_mean();
}

// Logits and targets as the loss takes them: s = cap tanh(z / cap) in the accumulator's type, in
// which a rounded cap would show, and ds / dz. Without a cap as they are, and no slope.
struct Capped {
  Tensor logits, slope, target;

  Capped(const Call& c, const Tensor& z, const Tensor& target_) : logits(z), target(target_) {
    if (c.softcap == 0) return;
    const ScalarType accum = accum_type(z.scalar_type());
    const Tensor t = at::tanh(z.to(accum).div(c.softcap));
    logits = t * c.softcap;
    slope = 1 - t * t;
    if (is_probabilities(z, target)) target = target.to(accum);
  }
  Tensor gradient(const Tensor& by_capped) const {
    return slope.defined() ? by_capped * slope : by_capped;
  }
};

// (loss, row_stats, total_weight)
inline Gradients loss_of(const Call& c, const Capped& z, int64_t reduction, ScalarType dtype) {
  static const auto op =
      find_op<Gradients(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt,
                        double, ScalarType, double, bool)>("warpwright::cross_entropy_forward");
  return op.call(z.logits, z.target, optional_if_defined(c.class_weight), reduction,
                 c.loss.ignore_index, c.loss.label_smoothing, dtype, c.loss.z_loss,
                 /*inplace_backward=*/false);
}

inline Tensor loss_gradient(const Call& c, const Tensor& grad_output, const Capped& z,
                            const Tensor& row_stats, const Tensor& total_weight,
                            int64_t reduction) {
  static const auto op =
      find_op<Tensor2(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const Tensor&, int64_t, SymInt, double, Mask2, double)>(
          "warpwright::cross_entropy_backward");
  return std::get<0>(op.call(grad_output, z.logits, z.target, optional_if_defined(c.class_weight),
                             row_stats, total_weight, reduction, c.loss.ignore_index,
                             c.loss.label_smoothing, {true, false}, c.loss.z_loss));
}

inline Tensor lse_of(const Capped& z, const Tensor& row_stats) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&)>("warpwright::cross_entropy_lse");
  return op.call(z.logits, row_stats);
}

// The gradient by the logits of <grad, lse>.
inline Tensor lse_gradient(const Capped& z, const Tensor& grad) {
  return z.gradient(at::softmax(z.logits.to(grad.scalar_type()), 1) * grad.unsqueeze(1));
}

}  // namespace warpwright::linear_cross_entropy
