// The loops of cross entropy's backward.
#include "cpu/exp.h"
#include "ops/cross_entropy/cpu/rows.h"

namespace warpwright {
namespace {

// grad_input = g (M p - w q), p = exp(z - max) / sum, M = W + 2 z_loss lse. The difference comes
// first, so it is exactly 0 for a certain label. A fused multiply-add cannot change that.
template <class T, class Q, TargetKind kKind>
struct RowBackward {
  using Compute = CpuCompute<T>;
  Compute max, sum;
  Compute grad;         // g; 0 of an ignored row
  Compute mass_by_sum;  // M / sum

  RowBackward(const CrossEntropyView<T, Q>& view, const CrossEntropyBackwardParams& p,
              int64_t row) {
    const Compute* stats = static_cast<const Compute*>(p.stats);
    max = stats[row];
    sum = stats[p.rows + row];
    const bool ignored = kKind != TargetKind::kProbabilities && view.ignored(row);
    grad = ignored ? Compute(0) : row_grad(view, p, row);
    mass_by_sum = view.row_mass(stats, row) / sum;
  }

  // The gradient of the label's own logit, in the compute type.
  Compute at_label(const CrossEntropyView<T, Q>& view, Compute z, Compute w) const {
    const Compute wq = kKind == TargetKind::kLabels ? w : (view.spread + view.keep) * w;
    return grad * (mass_by_sum * std::exp(z - max) - wq);
  }
};

// g (M p - w q) of neighbouring classes or pixels; `q` points at their probabilities.
template <TargetKind kKind, class T, class Q>
Lanes<T> gradient_lanes(const CrossEntropyView<T, Q>& view, const Lanes<T>& grad,
                        const Lanes<T>& mass_by_sum, const Lanes<T>& distance, const Lanes<T>& w,
                        const Q* q, int64_t count) {
  // The compiler may fuse either product with the difference. The bits shall not depend on that.
  const Lanes<T> exponential = exp_of(distance);
  if constexpr (kKind == TargetKind::kLabels) {
    return grad * (mass_by_sum * exponential);
  } else {
    Lanes<T> smoothed(view.spread);
    if constexpr (kKind == TargetKind::kProbabilities) {
      smoothed = at::vec::fmadd(Lanes<T>(view.keep), load_lanes<Q>(q, count), smoothed);
    }
    return grad * at::vec::fmsub(mass_by_sum, exponential, smoothed * w);
  }
}

template <class T, class Q, TargetKind kKind>
void rows_bwd(const CrossEntropyView<T, Q>& view, const CrossEntropyBackwardParams& p,
              int64_t begin, int64_t end) {
  using Compute = CpuCompute<T>;
  constexpr int64_t kLanes = Lanes<T>::size();
  for (int64_t row = begin; row < end; ++row) {
    const RowBackward<T, Q, kKind> terms(view, p, row);
    const T* z = view.input + row_offset(p.layout, row);
    const int64_t out = row_offset(p.grad_layout, row);
    T* dz = static_cast<T*>(p.grad_input) + out;
    Q* dq = static_cast<Q*>(p.grad_target) + out;
    const Q* q = kKind == TargetKind::kProbabilities
                     ? view.probabilities + row_offset(p.target_layout, row)
                     : nullptr;
    int64_t label = -1;
    Compute label_logit = 0;  // read first: the gradient may overwrite the logits
    if constexpr (kKind != TargetKind::kProbabilities) {
      if (!view.ignored(row)) label = label_of(p, row);
      if (label >= 0) label_logit = static_cast<Compute>(z[label]);
    }
    const Lanes<T> max(terms.max), grad(terms.grad), mass_by_sum(terms.mass_by_sum);
    auto distance_at = [&](int64_t c, int64_t count) { return load_lanes<T>(z + c, count) - max; };
    auto weight_at = [&](int64_t c, int64_t count) {
      return view.weight == nullptr || kKind == TargetKind::kLabels
                 ? Lanes<T>(Compute(1))
                 : Lanes<T>::loadu(view.weight + c, count);
    };
    auto dz_at = [&](int64_t c, int64_t count) {
      return gradient_lanes<kKind>(view, grad, mass_by_sum, distance_at(c, count),
                                   weight_at(c, count), q + c, count);
    };
    if (p.grad_input != nullptr) {
      int64_t c = 0;
      for (; c + 2 * kLanes <= p.classes; c += 2 * kLanes) {
        store_pair<T>(dz + c, dz_at(c, kLanes), dz_at(c + kLanes, kLanes));
      }
      for (; c < p.classes; c += kLanes) {
        const int64_t count = std::min(kLanes, p.classes - c);
        store_lanes<T>(dz + c, dz_at(c, count), count);
      }
    }
    if constexpr (kKind == TargetKind::kProbabilities) {
      const Lanes<T> scale = grad * Lanes<T>(-view.keep), log_sum(std::log(terms.sum));
      for (int64_t c = 0; p.grad_target != nullptr && c < p.classes; c += kLanes) {
        const int64_t count = std::min(kLanes, p.classes - c);
        store_lanes<Q>(dq + c, scale * weight_at(c, count) * (distance_at(c, count) - log_sum),
                       count);
      }
    }
    if (label >= 0) {
      dz[label] = static_cast<T>(terms.at_label(view, label_logit, view.weight_of(label)));
    }
  }
}

template <class T, class Q, TargetKind kKind>
void pixels_bwd(const CrossEntropyView<T, Q>& view, const CrossEntropyBackwardParams& p,
                int64_t begin, int64_t end) {
  using Compute = CpuCompute<T>;
  constexpr int64_t kLanes = Lanes<T>::size();
  for_strips<T>(p, begin, end, [&](int64_t row, int64_t strip) {
    alignas(64) Compute max[kStrip], log_sum[kStrip], grad[kStrip], mass_by_sum[kStrip];
    for (int64_t i = 0; i < strip; ++i) {
      const RowBackward<T, Q, kKind> terms(view, p, row + i);
      max[i] = terms.max;
      log_sum[i] = kKind == TargetKind::kProbabilities ? std::log(terms.sum) : Compute(0);
      grad[i] = terms.grad;
      mass_by_sum[i] = terms.mass_by_sum;
    }
    const T* z = view.input + row_offset(p.layout, row);
    T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, row);
    Compute label_logit[kStrip];  // read first: the gradient may overwrite the logits
    if constexpr (kKind != TargetKind::kProbabilities) {
      for (int64_t i = 0; i < strip; ++i) {
        const int64_t label = view.ignored(row + i) ? 0 : label_of(p, row + i);
        label_logit[i] = static_cast<Compute>(z[label * p.layout.class_stride + i]);
      }
    }
    Q* dq = static_cast<Q*>(p.grad_target) + row_offset(p.grad_layout, row);
    const Q* q = kKind == TargetKind::kProbabilities
                     ? view.probabilities + row_offset(p.target_layout, row)
                     : nullptr;
    for (int64_t c = 0; c < p.classes; ++c) {
      const Lanes<T> w(view.weight_of(c));
      const int64_t out = c * p.grad_layout.class_stride;
      for (int64_t i = 0; i < strip; i += kLanes) {
        const int64_t count = std::min(kLanes, strip - i);
        const Lanes<T> distance = load_lanes<T>(z + c * p.layout.class_stride + i, count) -
                                  Lanes<T>::loadu(max + i, count);
        const Lanes<T> g = Lanes<T>::loadu(grad + i, count);
        if (p.grad_input != nullptr) {
          const Lanes<T> gradient =
              gradient_lanes<kKind>(view, g, Lanes<T>::loadu(mass_by_sum + i, count), distance, w,
                                    q + c * p.target_layout.class_stride + i, count);
          store_lanes<T>(dz + out + i, gradient, count);
        }
        if constexpr (kKind == TargetKind::kProbabilities) {
          if (p.grad_target != nullptr) {
            const Lanes<T> log_p = distance - Lanes<T>::loadu(log_sum + i, count);
            store_lanes<Q>(dq + out + i, (g * Lanes<T>(-view.keep) * w) * log_p, count);
          }
        }
      }
    }
    if constexpr (kKind != TargetKind::kProbabilities) {
      for (int64_t i = 0; i < strip; ++i) {
        const int64_t label = label_of(p, row + i);
        if (label == p.ignore_index) continue;
        const RowBackward<T, Q, kKind> terms(view, p, row + i);
        dz[label * p.grad_layout.class_stride + i] =
            static_cast<T>(terms.at_label(view, label_logit[i], view.weight_of(label)));
      }
    }
  });
}

}  // namespace

namespace CPU_CAPABILITY {

void cross_entropy_backward_loops(const CrossEntropyBackwardParams& p, int64_t begin, int64_t end) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() {
    const CrossEntropyView<T, Q> view(p);
    const auto pass = p.layout.is_rows() ? rows_bwd<T, Q, kKind> : pixels_bwd<T, Q, kKind>;
    pass(view, p, begin, end);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
