// Cross entropy on the CPU, backward and double backward.
#include "ops/cross_entropy/cpu/rows.h"

namespace warpwright {
namespace {

// ---- backward ----

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
  Lanes<T> difference = mass_by_sum * exp_for<T>(distance);
  if constexpr (kKind == TargetKind::kSmoothedLabels) {
    difference = difference - Lanes<T>(view.spread) * w;
  } else if constexpr (kKind == TargetKind::kProbabilities) {
    const Lanes<T> smoothed = Lanes<T>(view.spread) + Lanes<T>(view.keep) * load_lanes<Q>(q, count);
    difference = difference - smoothed * w;
  }
  return grad * difference;
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
    Compute max[kStrip], log_sum[kStrip], grad[kStrip], mass_by_sum[kStrip];
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

template <class T, class Q, TargetKind kKind>
void backward_block(const CrossEntropyView<T, Q>& view, const CrossEntropyBackwardParams& p,
                    int64_t begin, int64_t end) {
  const auto pass = p.layout.is_rows() ? rows_bwd<T, Q, kKind> : pixels_bwd<T, Q, kKind>;
  pass(view, p, begin, end);
}

template <class T, class Q, TargetKind kKind>
void backward(const CrossEntropyBackwardParams& p) {
  const CrossEntropyView<T, Q> view(p);
  if (kKind != TargetKind::kProbabilities) check_labels(view);
  at::parallel_for(0, p.rows, view.rows_per_task(), [&](int64_t begin, int64_t end) {
    backward_block<T, Q, kKind>(view, p, begin, end);
  });
}

// ---- double backward ----

// Per row, with <a, b> = sum_c a_c b_c:
//   grad_grad_output = <v, M p - w q> - (1 - s) <u, w (z - lse)>   (the caller divides for a mean)
//   grad_input  = g p (M (v - <p, v>) + 2 z_loss <p, v>) - g (1 - s) (w u - p <w, u>)
//   grad_target = g (1 - s) w (<p, v> - v)
template <class T, class Q, TargetKind kKind>
void double_backward(const CrossEntropyDoubleBackwardParams& p) {
  using Compute = CpuCompute<T>;
  constexpr bool kHasLabels = kKind != TargetKind::kProbabilities;
  const CrossEntropyView<T, Q> view(p);
  if (kHasLabels) check_labels(view);
  const Compute* stats = static_cast<const Compute*>(p.stats);
  const Compute twice_z = static_cast<Compute>(2 * p.z_loss);
  at::parallel_for(0, p.rows, view.rows_per_task(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = row_offset(p.layout, row);
      const int64_t label = kHasLabels ? label_of(p, row) : -1;
      const bool ignored = kHasLabels && label == p.ignore_index;
      const Compute max = stats[row], sum = stats[p.rows + row], log_sum = std::log(sum);
      const Compute row_mass = view.row_mass(stats, row);
      auto distance = [&](int64_t at) { return static_cast<Compute>(view.input[at]) - max; };
      auto wq = [&](int64_t c, int64_t at) {
        Compute q = kKind == TargetKind::kLabels ? Compute(0) : view.spread;
        if constexpr (kHasLabels) {
          if (c == label) q += kKind == TargetKind::kLabels ? Compute(1) : view.keep;
        } else {
          q += view.keep * static_cast<Compute>(view.probabilities[at]);
        }
        return q * view.weight_of(c);
      };
      auto value_of = [&](auto* array, int64_t at) {
        return array == nullptr ? Compute(0) : static_cast<Compute>(array[at]);
      };
      const T* v = static_cast<const T*>(p.v);
      const Q* u = static_cast<const Q*>(p.u);

      Compute pv = 0, wqv = 0, wu = 0, wu_log_p = 0;
      for (int64_t c = 0; c < p.classes; ++c) {
        const int64_t at = start + c * p.layout.class_stride;
        const Compute v_c = value_of(v, at);
        pv += std::exp(distance(at)) / sum * v_c;
        wqv += wq(c, at) * v_c;
        if (u != nullptr) {
          const Compute w_u = view.weight_of(c) * static_cast<Compute>(u[at]);
          wu += w_u;
          wu_log_p += w_u * (distance(at) - log_sum);
        }
      }
      if (p.grad_grad_output != nullptr) {
        const Compute total = row_mass * pv - wqv - view.keep * wu_log_p;
        static_cast<Compute*>(p.grad_grad_output)[row] = ignored ? Compute(0) : total;
      }
      const Compute grad = ignored ? Compute(0) : row_grad(view, p, row);
      for (int64_t c = 0; c < p.classes; ++c) {
        const int64_t at = start + c * p.layout.class_stride;
        const Compute w = view.weight_of(c), v_c = value_of(v, at);
        if (p.grad_input != nullptr) {
          const Compute prob = std::exp(distance(at)) / sum;
          static_cast<T*>(p.grad_input)[at] =
              static_cast<T>(grad * (prob * (row_mass * (v_c - pv) + twice_z * pv) -
                                     view.keep * (w * value_of(u, at) - prob * wu)));
        }
        if (p.grad_target != nullptr) {
          static_cast<Q*>(p.grad_target)[at] = static_cast<Q>(grad * view.keep * w * (pv - v_c));
        }
      }
    }
  });
}

}  // namespace

void cross_entropy_backward_cpu(const CrossEntropyBackwardParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { backward<T, Q, kKind>(p); });
}

void cross_entropy_backward_block_cpu(const CrossEntropyBackwardParams& p, int64_t begin,
                                      int64_t end) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() {
    backward_block<T, Q, kKind>(CrossEntropyView<T, Q>(p), p, begin, end);
  });
}

void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { double_backward<T, Q, kKind>(p); });
}

}  // namespace warpwright
