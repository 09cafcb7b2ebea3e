// The backward of a row: its gradient from the saved maximum and sum.
#pragma once

#include "ops/cross_entropy/cuda/row_math.cuh"

namespace warpwright {

// A row's gradient: grad_input = g (M p - w q) and grad_target = -g (1 - s) w log p, with p = exp(z
// - max) / sum and M = W + 2 z_loss lse. The difference comes first, so that it is exactly 0 for a
// certain label.
template <class T, TargetKind kKind>
struct RowGradient {
  using Acc = Accum<T>;
  Acc max, sum;
  Acc grad;         // g; 0 for an ignored row
  Acc mass;         // M
  Acc mass_by_sum;  // M / sum
  int64_t label = -1;
  bool zero = false;  // the whole row is 0 for any logits: they need not be read

  // From the numbers that a forward saved.
  template <class Params>
  __device__ __forceinline__ RowGradient(const Params& p, int64_t row) {
    const Acc* stats = static_cast<const Acc*>(p.stats);
    Acc g = 1;
    if (p.grad_output != nullptr) {
      g = read_either<T>(p.grad_output, p.loss_dtype,
                         p.reduction == LossReduction::kNone ? row : int64_t{0});
    }
    if (p.reduction == LossReduction::kMean) g /= *static_cast<const Acc*>(p.total_weight);
    Label target{-1, false, false};
    if constexpr (kKind != TargetKind::kProbabilities) target = load_label(p, row);
    const Acc saved_mass = kKind == TargetKind::kLabels ? Acc(0) : stats[2 * p.rows + row];
    set(p, target, stats[row], stats[p.rows + row], saved_mass, g);
  }

  // `row_mass` is W, unless q is one-hot.
  __device__ __forceinline__ RowGradient(const CrossEntropyProblem& p, const Label& target,
                                         Acc row_max, Acc row_sum, Acc row_mass, Acc g) {
    set(p, target, row_max, row_sum, row_mass, g);
  }

  __device__ __forceinline__ void set(const CrossEntropyProblem& p, const Label& target,
                                      Acc row_max, Acc row_sum, Acc row_mass, Acc g) {
    max = row_max;
    sum = row_sum;
    grad = g;
    if constexpr (kKind == TargetKind::kProbabilities) {
      mass = row_mass;
    } else {
      mass = 0;
      if (target.valid) {
        label = target.value;
        mass = kKind == TargetKind::kLabels ? class_weight<Acc>(p, label) : row_mass;
      } else if (target.ignored) {
        grad = 0;
        // NaN and infinities of an ignored row propagate, as in native's 0 * NaN.
        zero = max - max == 0 && sum - sum == 0;
        if (zero) max = 0;
      } else {
        grad = quiet_nan(Acc());
      }
    }
    if (p.z_loss != 0 && (kKind == TargetKind::kProbabilities || label >= 0)) {
      mass += Acc(2) * static_cast<Acc>(p.z_loss) * (max + log(sum));
    }
    mass_by_sum = mass / sum;
  }

  // The gradient of lane `from` in each group of `lanes` lanes. All lanes of the warp must call.
  __device__ __forceinline__ RowGradient of_lane(int from, int lanes) const {
    RowGradient other = *this;
    other.max = __shfl_sync(kFullMask, max, from, lanes);
    other.sum = __shfl_sync(kFullMask, sum, from, lanes);
    other.grad = __shfl_sync(kFullMask, grad, from, lanes);
    other.mass_by_sum = __shfl_sync(kFullMask, mass_by_sum, from, lanes);
    other.label = __shfl_sync(kFullMask, label, from, lanes);
    other.zero = __shfl_sync(kFullMask, static_cast<int>(zero), from, lanes) != 0;
    return other;
  }

  __device__ __forceinline__ Acc distance(Acc z) const { return z - max; }
  __device__ __forceinline__ Acc operator()(Acc distance, Acc wq) const {
    return grad * (mass_by_sum * exp_for<T>(distance) - wq);
  }
  // The same for a one-hot q of another class: all of them have one factor.
  __device__ __forceinline__ Acc of_no_label(Acc distance) const {
    return grad * mass_by_sum * exp_for<T>(distance);
  }
  // The label's own logit.
  __device__ __forceinline__ Acc at_label(Acc z, Acc w, const Smoothing<Acc>& smoothing) const {
    return (*this)(distance(z),
                   kKind == TargetKind::kLabels ? w : (smoothing.spread + smoothing.keep) * w);
  }
};

// One vector of a row: gradients of kVec classes from `c` on.
template <class T, class Q, TargetKind kKind, int kVec>
__device__ __forceinline__ void write_gradients(const CrossEntropyProblem& p,
                                                const Smoothing<Accum<T>>& smoothing,
                                                const RowGradient<T, kKind>& gradient, int64_t c,
                                                const Vec<T, kVec>& z, const Q* q, T* dz, Q* dq) {
  using Acc = Accum<T>;
  Acc distance[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) distance[j] = gradient.distance(convert<Acc>(z[j]));
  if (dz != nullptr) {
    Acc target[kVec] = {};
    if constexpr (kKind == TargetKind::kProbabilities) load_converted<kVec>(q + c, target);
    Acc result[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result[j] = gradient(distance[j], weighted_target<kKind>(p, smoothing, c + j, target[j]));
    }
    if constexpr (kKind != TargetKind::kProbabilities) {
      const int64_t hit = gradient.label - c;
      if (hit >= 0 && hit < kVec) {
        const Acc w = class_weight<Acc>(p, gradient.label);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (hit == j) result[j] = gradient.at_label(convert<Acc>(z[j]), w, smoothing);
        }
      }
    }
    store_converted<kVec>(dz + c, result);
  }
  if constexpr (kKind == TargetKind::kProbabilities) {
    if (dq != nullptr) {
      const Acc log_sum = log(gradient.sum);
      Acc result[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        result[j] =
            -gradient.grad * smoothing.keep * class_weight<Acc>(p, c + j) * (distance[j] - log_sum);
      }
      store_converted<kVec>(dq + c, result);
    }
  }
}

}  // namespace warpwright
