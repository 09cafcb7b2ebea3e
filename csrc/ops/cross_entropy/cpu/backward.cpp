// Cross entropy on the CPU, backward and double backward.
#include "ops/cross_entropy/cpu/rows.h"

namespace warpwright {
namespace {

// ---- backward ----

template <class T, class Q, TargetKind kKind>
void backward(const CrossEntropyBackwardParams& p) {
  const CrossEntropyView<T, Q> view(p);
  if (kKind != TargetKind::kProbabilities) check_labels(view);
  at::parallel_for(0, p.rows, view.rows_per_task(), [&](int64_t begin, int64_t end) {
    WARPWRIGHT_LOOPS(cross_entropy_backward_loops)(p, begin, end);
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

void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { double_backward<T, Q, kKind>(p); });
}

}  // namespace warpwright
