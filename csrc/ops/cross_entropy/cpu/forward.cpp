// Cross entropy on the CPU, forward: vectorised over contiguous classes, else over pixels. A row is
// read twice, the second time from cache. Row losses are summed in row order, so the result does
// not depend on the number of threads. If the gradient is wanted too, a block of rows runs its
// backward while it is in cache.
#include <iterator>
#include <memory>
#include <numeric>

#include "ops/cross_entropy/cpu/rows.h"

namespace warpwright {
namespace {

// Every kSumBlock terms, the sum is added to a compensated one. A confident row is one 1 and many
// small numbers, and adding each of them to the 1 would lose half an ulp.
constexpr int64_t kSumBlock = 4;

// Kahan's sum, which keeps infinities.
template <class V>
struct CompensatedSum {
  V sum = V(typename V::value_type(0)), lost = V(typename V::value_type(0));

  void add(const V& value) {
    const V corrected = value - lost;
    const V next = sum + corrected;
    lost = (next - sum) - corrected;
    lost = V::blendv(lost, V(typename V::value_type(0)), lost != lost);
    sum = next;
  }
};

// sum_c w_c q_c (z_c - max) and sum_c w_c q_c over classes [c, c + lanes) of one row. q is the
// probabilities, or for smoothed labels only the uniform part.
template <TargetKind kKind, class T, class Q>
void add_linear(const CrossEntropyView<T, Q>& view, const Lanes<T>& distance, int64_t row_start,
                int64_t c, int64_t count, Lanes<T>& linear, Lanes<T>& mass) {
  Lanes<T> wq(view.spread);
  if constexpr (kKind == TargetKind::kProbabilities) {
    wq = wq + Lanes<T>(view.keep) * load_lanes<Q>(view.probabilities + row_start + c, count);
  }
  if (view.weight != nullptr) wq = wq * Lanes<T>::loadu(view.weight + c, count);
  // Lanes past the row's end must not add anything, not even 0 * inf.
  linear = linear + first_lanes(Lanes<T>(0), wq * distance, count);
  mass = mass + first_lanes(Lanes<T>(0), wq, count);
}

// Both exponentials below may return any number for NaN. A row with NaN, +inf, or only -inf has a
// maximum that is not finite. Its sum is set to NaN, which makes its gradient NaN.

// A term of a row's sum: its few ulps are below the sum's own rounding.
template <class V>
V exp_to_sum(const V& x) {
  return x.exp_u20();
}

// In double. Next to a row's largest term, 1, each float addition would round off part of the rest.
// The gradient of a nearly certain label consists of that rest.
template <class V>
auto sum_lanes(const V& value) {
  using Compute = typename V::value_type;
  Compute lanes[V::size()];
  value.store(lanes);
  return static_cast<Compute>(std::accumulate(std::begin(lanes), std::end(lanes), 0.0));
}

// Keeps NaN. Several independent maxima hide the latency of each.
template <class T>
CpuCompute<T> max_of_row(const T* z, int64_t classes) {
  using Compute = CpuCompute<T>;
  constexpr int64_t kLanes = Lanes<T>::size(), kChains = 4;
  const Lanes<T> lowest(-std::numeric_limits<Compute>::infinity());
  const auto larger = [](const Lanes<T>& a, const Lanes<T>& b) { return at::vec::maximum(a, b); };
  Lanes<T> max[kChains] = {lowest, lowest, lowest, lowest};
  int64_t c = 0;
  for (; c + kChains * kLanes <= classes; c += kChains * kLanes) {
    for (int64_t i = 0; i < kChains; ++i) {
      max[i] = larger(max[i], load_lanes<T>(z + c + i * kLanes, kLanes));
    }
  }
  for (; c < classes; c += kLanes) {
    const int64_t count = std::min(kLanes, classes - c);
    max[0] = larger(max[0], first_lanes(lowest, load_lanes<T>(z + c, count), count));
  }
  return at::vec::vec_reduce_all<Compute>(larger,
                                          larger(larger(max[0], max[1]), larger(max[2], max[3])));
}

template <class T, class Q, TargetKind kKind>
void rows_fwd(const CrossEntropyView<T, Q>& view, int64_t begin, int64_t end,
              CpuCompute<T>* row_max, CpuCompute<T>* row_sum, CpuCompute<T>* linear_of,
              CpuCompute<T>* mass_of) {
  using Compute = CpuCompute<T>;
  constexpr int64_t kLanes = Lanes<T>::size();
  const int64_t classes = view.p.classes;
  for (int64_t row = begin; row < end; ++row) {
    const T* z = view.input + row_offset(view.p.layout, row);
    row_max[row] = max_of_row<T>(z, classes);
    const Lanes<T> shift(row_max[row]);
    const int64_t target_start =
        kKind == TargetKind::kProbabilities ? row_offset(view.p.target_layout, row) : 0;
    CompensatedSum<Lanes<T>> sum, linear, mass;
    for (int64_t first = 0; first < classes; first += kSumBlock * kLanes) {
      const int64_t last = std::min(classes, first + kSumBlock * kLanes);
      Lanes<T> block_sum(Compute(0)), block_linear(Compute(0)), block_mass(Compute(0));
      for (int64_t c = first; c < last; c += kLanes) {
        const int64_t count = std::min(kLanes, last - c);
        const Lanes<T> distance = load_lanes<T>(z + c, count) - shift;
        block_sum = block_sum + first_lanes(Lanes<T>(Compute(0)), exp_to_sum(distance), count);
        if constexpr (kKind != TargetKind::kLabels) {
          add_linear<kKind>(view, distance, target_start, c, count, block_linear, block_mass);
        }
      }
      sum.add(block_sum);
      if constexpr (kKind != TargetKind::kLabels) {
        linear.add(block_linear);
        mass.add(block_mass);
      }
    }
    row_sum[row] = sum_lanes(sum.sum);
    if constexpr (kKind != TargetKind::kLabels) {
      linear_of[row] = sum_lanes(linear.sum);
      mass_of[row] = sum_lanes(mass.sum);
    }
  }
}

template <class V>
void add_to(typename V::value_type* sums, const V& value) {
  (V::loadu(sums) + value).store(sums);
}

template <class T, class Q, TargetKind kKind>
void pixels_fwd(const CrossEntropyView<T, Q>& view, int64_t begin, int64_t end,
                CpuCompute<T>* row_max, CpuCompute<T>* row_sum, CpuCompute<T>* linear_of,
                CpuCompute<T>* mass_of) {
  using Compute = CpuCompute<T>;
  constexpr int64_t kLanes = Lanes<T>::size();
  const CrossEntropyProblem& p = view.p;
  for_strips<T>(p, begin, end, [&](int64_t row, int64_t strip) {
    const T* z = view.input + row_offset(p.layout, row);
    const Q* q = kKind == TargetKind::kProbabilities
                     ? view.probabilities + row_offset(p.target_layout, row)
                     : nullptr;
    Compute max[kStrip];
    CompensatedSum<Lanes<T>> sum[kStrip / kLanes], linear[kStrip / kLanes], mass[kStrip / kLanes];
    std::fill_n(max, kStrip, -std::numeric_limits<Compute>::infinity());
    for (int64_t c = 0; c < p.classes; ++c) {
      for (int64_t i = 0; i < strip; i += kLanes) {
        const int64_t count = std::min(kLanes, strip - i);
        const Lanes<T> value = load_lanes<T>(z + c * p.layout.class_stride + i, count);
        at::vec::maximum(Lanes<T>::loadu(max + i), value).store(max + i);
      }
    }
    for (int64_t first = 0; first < p.classes; first += kSumBlock) {
      Compute block_sum[kStrip] = {}, block_linear[kStrip] = {}, block_mass[kStrip] = {};
      for (int64_t c = first; c < std::min(p.classes, first + kSumBlock); ++c) {
        const Lanes<T> w(view.weight_of(c));
        for (int64_t i = 0; i < strip; i += kLanes) {
          const int64_t count = std::min(kLanes, strip - i);
          const Lanes<T> value = load_lanes<T>(z + c * p.layout.class_stride + i, count);
          const Lanes<T> distance = value - Lanes<T>::loadu(max + i);
          add_to(block_sum + i, exp_to_sum(distance));
          if constexpr (kKind != TargetKind::kLabels) {
            Lanes<T> wq(view.spread);
            if constexpr (kKind == TargetKind::kProbabilities) {
              wq = wq + Lanes<T>(view.keep) *
                            load_lanes<Q>(q + c * p.target_layout.class_stride + i, count);
            }
            wq = wq * w;
            add_to(block_linear + i, wq * distance);
            add_to(block_mass + i, wq);
          }
        }
      }
      for (int64_t i = 0; i < strip; i += kLanes) {
        sum[i / kLanes].add(Lanes<T>::loadu(block_sum + i));
        if constexpr (kKind != TargetKind::kLabels) {
          linear[i / kLanes].add(Lanes<T>::loadu(block_linear + i));
          mass[i / kLanes].add(Lanes<T>::loadu(block_mass + i));
        }
      }
    }
    std::copy_n(max, strip, row_max + row);
    for (int64_t i = 0; i < strip; i += kLanes) {
      const auto count = static_cast<int>(std::min(kLanes, strip - i));
      sum[i / kLanes].sum.store(row_sum + row + i, count);
      if constexpr (kKind != TargetKind::kLabels) {
        linear[i / kLanes].sum.store(linear_of + row + i, count);
        mass[i / kLanes].sum.store(mass_of + row + i, count);
      }
    }
  });
}

// Bytes of logits that stay in a core's cache from a forward to a backward.
constexpr int64_t kBlockBytes = 1 << 18;

template <class T, class Q, TargetKind kKind>
void forward(const CrossEntropyParams& p, const CrossEntropyBackwardParams* gradient) {
  using Compute = CpuCompute<T>;
  const CrossEntropyView<T, Q> view(p);
  constexpr bool kHasLabels = kKind != TargetKind::kProbabilities;
  double total = kHasLabels ? check_labels(view) : static_cast<double>(p.classes == 0 ? 0 : p.rows);

  const bool reduced = p.reduction != LossReduction::kNone;
  *static_cast<Compute*>(p.total_weight) = reduced ? static_cast<Compute>(total) : Compute(0);

  Compute* row_max = static_cast<Compute*>(p.stats);
  Compute* row_sum = row_max + p.rows;
  std::unique_ptr<Compute[]> scratch(new Compute[(kKind == TargetKind::kLabels ? 1 : 2) * p.rows]);
  Compute* row_loss = scratch.get();
  Compute* linear_of = row_loss + p.rows;
  Compute* mass_of = row_max + 2 * p.rows;

  auto forward_block = [&](int64_t begin, int64_t end) {
    const auto pass = p.layout.is_rows() ? rows_fwd<T, Q, kKind> : pixels_fwd<T, Q, kKind>;
    pass(view, begin, end, row_max, row_sum, linear_of, mass_of);
    for (int64_t row = begin; row < end && p.classes != 0; ++row) {
      const bool finite = row_max[row] - row_max[row] == 0;
      if (!finite) row_sum[row] = std::numeric_limits<Compute>::quiet_NaN();
    }
    // The logarithms, vectorised, written to where the losses will be.
    at::vec::map<Compute>([](Vectorized<Compute> sum) { return sum.log(); }, row_loss + begin,
                          row_sum + begin, end - begin);
    for (int64_t row = begin; row < end; ++row) {
      const Compute log_sum = p.classes == 0 ? Compute(0) : row_loss[row];
      if (p.lse != nullptr) static_cast<Compute*>(p.lse)[row] = row_max[row] + log_sum;
      if constexpr (kHasLabels) {
        const int64_t label = label_of(p, row);
        if (label == p.ignore_index) {
          row_loss[row] = 0;
          if constexpr (kKind == TargetKind::kSmoothedLabels) mass_of[row] = 0;
          continue;
        }
        const int64_t at = row_offset(p.layout, row) + label * p.layout.class_stride;
        const Compute distance = static_cast<Compute>(view.input[at]) - row_max[row];
        row_loss[row] = view.weight_of(label) * (log_sum - distance);
        if constexpr (kKind == TargetKind::kSmoothedLabels) {
          row_loss[row] = view.keep * row_loss[row] + (mass_of[row] * log_sum - linear_of[row]);
          mass_of[row] += view.keep * view.weight_of(label);
        }
      } else {
        row_loss[row] = mass_of[row] * log_sum - linear_of[row];
      }
      if (p.z_loss != 0 && p.classes != 0) {
        const Compute lse = row_max[row] + log_sum;
        row_loss[row] += static_cast<Compute>(p.z_loss) * lse * lse;
      }
    }
  };
  const int64_t row_bytes = std::max<int64_t>(1, p.classes * sizeof(T));
  const int64_t block = gradient == nullptr ? std::max<int64_t>(1, p.rows)
                                            : ceil_div(std::max(kBlockBytes, row_bytes), row_bytes);
  at::parallel_for(0, p.rows, view.rows_per_task(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += block) {
      const int64_t last = std::min(end, row + block);
      forward_block(row, last);
      if (gradient != nullptr) cross_entropy_backward_block_cpu(*gradient, row, last);
    }
  });

  if (!reduced) {
    for (int64_t row = 0; row < p.rows; ++row) {
      write_either<T>(p.loss, view.loss_is_compute, row, row_loss[row]);
    }
    return;
  }
  double sum = 0;
  for (int64_t row = 0; row < p.rows; ++row) sum += row_loss[row];
  if (p.reduction == LossReduction::kMean) sum /= total;
  write_either<T>(p.loss, view.loss_is_compute, 0, static_cast<Compute>(sum));
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { forward<T, Q, kKind>(p, nullptr); });
}

void cross_entropy_gradient_cpu(const CrossEntropyGradientParams& p) {
  const CrossEntropyBackwardParams gradient = backward_of(p);
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() {
    if constexpr (kKind != TargetKind::kProbabilities) {
      forward<T, Q, kKind>(p, p.grad_input == nullptr ? nullptr : &gradient);
    }
  });
}

}  // namespace warpwright
