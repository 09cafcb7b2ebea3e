// Vectorised over classes when they lie side by side, else over pixels. A row is read twice, the
// second time from cache. Row losses are summed in row order, so the result does not depend on the
// number of threads.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "ops/cross_entropy/cross_entropy.h"
#include "torch/cpu.h"

namespace warpwright {
namespace {

using at::vec::Vectorized;

template <class T>
using Lanes = Vectorized<CpuCompute<T>>;

// The first `count` lanes from memory; the others are zero.
template <class T>
Lanes<T> load_lanes(const T* source, int64_t count) {
  using Compute = CpuCompute<T>;
  if constexpr (std::is_same_v<T, Compute>) {
    return count == Lanes<T>::size() ? Lanes<T>::loadu(source) : Lanes<T>::loadu(source, count);
  } else {
    Lanes<T> result;
    if (count == Lanes<T>::size()) {
      at::vec::load_to_float<T>(source, result);
    } else {
      T padded[Lanes<T>::size()] = {};
      std::copy_n(source, count, padded);
      at::vec::load_to_float<T>(padded, result);
    }
    return result;
  }
}

// `value` in the first `count` lanes, `fill` in the others.
template <class V>
V first_lanes(const V& fill, const V& value, int64_t count) {
  return count == V::size() ? value : V::set(fill, value, count);
}

// Two whole vectors: 16-bit types are rounded in pairs.
template <class T>
void store_pair(T* destination, const Lanes<T>& low, const Lanes<T>& high) {
  if constexpr (std::is_same_v<T, CpuCompute<T>>) {
    low.store(destination);
    high.store(destination + Lanes<T>::size());
  } else {
    at::vec::convert_from_float<T>(low, high).store(destination);
  }
}

template <class T>
void store_lanes(T* destination, const Lanes<T>& value, int64_t count) {
  if constexpr (std::is_same_v<T, CpuCompute<T>>) {
    value.store(destination, static_cast<int>(count));
  } else {
    at::vec::convert_from_float<T>(value, value).store(destination, static_cast<int>(count));
  }
}

// A number of type T or Compute behind a pointer whose type is known at run time.
template <class T>
CpuCompute<T> read_either(const void* data, bool is_compute, int64_t i) {
  if (is_compute) return static_cast<const CpuCompute<T>*>(data)[i];
  return static_cast<CpuCompute<T>>(static_cast<const T*>(data)[i]);
}

template <class T>
void write_either(void* data, bool is_compute, int64_t i, CpuCompute<T> value) {
  if (is_compute) {
    static_cast<CpuCompute<T>*>(data)[i] = value;
  } else {
    static_cast<T*>(data)[i] = static_cast<T>(value);
  }
}

int64_t label_of(const CrossEntropyProblem& p, int64_t row) {
  return p.target_dtype == DType::kUInt8 ? static_cast<const uint8_t*>(p.target)[row]
                                         : static_cast<const int64_t*>(p.target)[row];
}

// One problem seen through its types; every pass below starts from this.
template <class T, class Q>
struct View {
  using Compute = CpuCompute<T>;

  explicit View(const CrossEntropyProblem& problem)
      : p(problem),
        input(static_cast<const T*>(problem.input)),
        probabilities(static_cast<const Q*>(problem.target)),
        weight(static_cast<const Compute*>(problem.weight)),
        loss_is_compute(dtype_size(problem.loss_dtype) == sizeof(Compute)),
        keep(static_cast<Compute>(1 - problem.label_smoothing)),
        spread(static_cast<Compute>(problem.label_smoothing / problem.classes)) {}

  Compute weight_of(int64_t c) const { return weight == nullptr ? Compute(1) : weight[c]; }
  bool ignored(int64_t row) const { return label_of(p, row) == p.ignore_index; }
  // W = sum_c w_c q_c; 0 of an ignored row.
  Compute row_mass(const Compute* stats, int64_t row) const {
    if (p.kind != TargetKind::kLabels) return stats[2 * p.rows + row];
    return ignored(row) ? Compute(0) : weight_of(label_of(p, row));
  }
  int64_t grain() const {
    return std::max<int64_t>(1, kCpuGrain / 4 / std::max<int64_t>(1, p.classes));
  }

  const CrossEntropyProblem& p;
  const T* input;
  const Q* probabilities;
  const Compute* weight;
  bool loss_is_compute;
  Compute keep;    // 1 - s
  Compute spread;  // s / C
};

// Scale of a row's gradient before any weight.
template <class T, class Q, class Params>
CpuCompute<T> row_grad(const View<T, Q>& view, const Params& p, int64_t row) {
  using Compute = CpuCompute<T>;
  const bool per_row = p.reduction == Reduction::kNone;
  const Compute grad = read_either<T>(p.grad_output, view.loss_is_compute, per_row ? row : 0);
  return p.reduction == Reduction::kMean ? grad / *static_cast<const Compute*>(p.total_weight)
                                         : grad;
}

// Every label is a class or ignored; also sums what a mean divides by.
template <class T, class Q>
double check_labels(const View<T, Q>& view) {
  const CrossEntropyProblem& p = view.p;
  double total = 0;
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t label = label_of(p, row);
    if (label == p.ignore_index) continue;
    TORCH_CHECK_INDEX(label >= 0 && label < p.classes, "Target ", label, " is out of bounds.");
    total += view.weight_of(label);
  }
  return total;
}

// ---- forward ----

// Every so many terms a sum goes over to a compensated one: a confident row is one 1 and many small
// numbers, and each of them added to the 1 would lose half an ulp of it.
constexpr int64_t kSumBlock = 4;

// Kahan's sum; an infinity stays one.
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

// sum_c w_c q_c (z_c - max) and sum_c w_c q_c over classes [c, c + lanes) of one row, where q is
// the probabilities, or for smoothed labels only the uniform part.
template <TargetKind kKind, class T, class Q>
void add_linear(const View<T, Q>& view, const Lanes<T>& distance, int64_t row_start, int64_t c,
                int64_t count, Lanes<T>& linear, Lanes<T>& mass) {
  Lanes<T> wq(view.spread);
  if constexpr (kKind == TargetKind::kProbabilities) {
    wq = wq + Lanes<T>(view.keep) * load_lanes<Q>(view.probabilities + row_start + c, count);
  }
  if (view.weight != nullptr) wq = wq * Lanes<T>::loadu(view.weight + c, count);
  // Lanes past the row's end must not add anything, not even 0 * inf.
  linear = linear + first_lanes(Lanes<T>(0), wq * distance, count);
  mass = mass + first_lanes(Lanes<T>(0), wq, count);
}

// Both kinds below give any number for NaN. A row with NaN or +inf, or of -inf alone, has a maximum
// that is not finite: its sum is set to NaN, and that makes its gradient NaN.

// A term of a row's sum: its few ulps are below the sum's own rounding.
template <class V>
V exp_to_sum(const V& x) {
  return x.exp_u20();
}

// As exact as results of type T can show: rounding to 16 bits hides 20 float ulps.
template <class T>
Lanes<T> exp_for(const Lanes<T>& x) {
  if constexpr (sizeof(T) == 2) {
    return x.exp_u20();
  } else {
    return x.exp();
  }
}

template <class V>
auto sum_lanes(const V& value) {
  return at::vec::vec_reduce_all<typename V::value_type>([](V a, V b) { return a + b; }, value);
}

// Keeps NaN. Several maxima side by side hide the latency of each.
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
void rows_fwd(const View<T, Q>& view, int64_t begin, int64_t end, CpuCompute<T>* row_max,
              CpuCompute<T>* row_sum, CpuCompute<T>* linear_of, CpuCompute<T>* mass_of) {
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

// A strip of up to kStrip neighbouring pixels at a time: each class is one contiguous read.
constexpr int64_t kStrip = 64;

template <class V>
void add_to(typename V::value_type* sums, const V& value) {
  (V::loadu(sums) + value).store(sums);
}

template <class T, class F>
void for_strips(const CrossEntropyProblem& p, int64_t begin, int64_t end, F&& f) {
  for (int64_t row = begin; row < end;) {
    const int64_t left_in_image = p.layout.inner - row % p.layout.inner;
    const int64_t count = std::min({kStrip, left_in_image, end - row});
    f(row, count);
    row += count;
  }
}

template <class T, class Q, TargetKind kKind>
void pixels_fwd(const View<T, Q>& view, int64_t begin, int64_t end, CpuCompute<T>* row_max,
                CpuCompute<T>* row_sum, CpuCompute<T>* linear_of, CpuCompute<T>* mass_of) {
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

template <class T, class Q, TargetKind kKind>
void forward(const CrossEntropyParams& p) {
  using Compute = CpuCompute<T>;
  const View<T, Q> view(p);
  constexpr bool kHasLabels = kKind != TargetKind::kProbabilities;
  double total = kHasLabels ? check_labels(view) : static_cast<double>(p.classes == 0 ? 0 : p.rows);

  Compute* row_max = static_cast<Compute*>(p.stats);
  Compute* row_sum = row_max + p.rows;
  std::unique_ptr<Compute[]> scratch(new Compute[(kKind == TargetKind::kLabels ? 1 : 2) * p.rows]);
  Compute* row_loss = scratch.get();
  Compute* linear_of = row_loss + p.rows;
  Compute* mass_of = row_max + 2 * p.rows;

  at::parallel_for(0, p.rows, view.grain(), [&](int64_t begin, int64_t end) {
    const auto pass = p.layout.is_rows() ? rows_fwd<T, Q, kKind> : pixels_fwd<T, Q, kKind>;
    pass(view, begin, end, row_max, row_sum, linear_of, mass_of);
    for (int64_t row = begin; row < end && p.classes != 0; ++row) {
      const bool finite = row_max[row] - row_max[row] == 0;
      if (!finite) row_sum[row] = std::numeric_limits<Compute>::quiet_NaN();
    }
    // The logarithms, many at once, where the losses will be.
    at::vec::map<Compute>([](Vectorized<Compute> sum) { return sum.log(); }, row_loss + begin,
                          row_sum + begin, end - begin);
    for (int64_t row = begin; row < end; ++row) {
      const Compute log_sum = p.classes == 0 ? Compute(0) : row_loss[row];
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
    }
  });

  const bool reduced = p.reduction != Reduction::kNone;
  *static_cast<Compute*>(p.total_weight) = reduced ? static_cast<Compute>(total) : Compute(0);
  if (!reduced) {
    for (int64_t row = 0; row < p.rows; ++row) {
      write_either<T>(p.loss, view.loss_is_compute, row, row_loss[row]);
    }
    return;
  }
  double sum = 0;
  for (int64_t row = 0; row < p.rows; ++row) sum += row_loss[row];
  if (p.reduction == Reduction::kMean) sum /= total;
  write_either<T>(p.loss, view.loss_is_compute, 0, static_cast<Compute>(sum));
}

// ---- backward ----

// grad_input = g (W p - w q), p = exp(z - max) / sum. The difference comes first: it is exactly 0
// where it should be, and a fused multiply-add can't spoil that.
template <class T, class Q, TargetKind kKind>
struct RowBackward {
  using Compute = CpuCompute<T>;
  Compute max, sum;
  Compute grad;         // g; 0 of an ignored row
  Compute mass_by_sum;  // W / sum

  RowBackward(const View<T, Q>& view, const CrossEntropyBackwardParams& p, int64_t row) {
    const Compute* stats = static_cast<const Compute*>(p.stats);
    max = stats[row];
    sum = stats[p.rows + row];
    const bool ignored = kKind != TargetKind::kProbabilities && view.ignored(row);
    grad = ignored ? Compute(0) : row_grad(view, p, row);
    mass_by_sum = view.row_mass(stats, row) / sum;
  }

  // The gradient of the label's own logit, in the compute type.
  Compute at_label(const View<T, Q>& view, Compute z, Compute w) const {
    const Compute wq = kKind == TargetKind::kLabels ? w : (view.spread + view.keep) * w;
    return grad * (mass_by_sum * std::exp(z - max) - wq);
  }
};

// g (W p - w q) of neighbouring classes or pixels; `q` points at their probabilities.
template <TargetKind kKind, class T, class Q>
Lanes<T> gradient_lanes(const View<T, Q>& view, const Lanes<T>& grad, const Lanes<T>& mass_by_sum,
                        const Lanes<T>& distance, const Lanes<T>& w, const Q* q, int64_t count) {
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
void rows_bwd(const View<T, Q>& view, const CrossEntropyBackwardParams& p, int64_t begin,
              int64_t end) {
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
    if constexpr (kKind != TargetKind::kProbabilities) {
      const int64_t label = label_of(p, row);
      if (label != p.ignore_index) {
        const Compute value = static_cast<Compute>(z[label]);
        dz[label] = static_cast<T>(terms.at_label(view, value, view.weight_of(label)));
      }
    }
  }
}

template <class T, class Q, TargetKind kKind>
void pixels_bwd(const View<T, Q>& view, const CrossEntropyBackwardParams& p, int64_t begin,
                int64_t end) {
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
        const Compute value = static_cast<Compute>(z[label * p.layout.class_stride + i]);
        dz[label * p.grad_layout.class_stride + i] =
            static_cast<T>(terms.at_label(view, value, view.weight_of(label)));
      }
    }
  });
}

template <class T, class Q, TargetKind kKind>
void backward(const CrossEntropyBackwardParams& p) {
  const View<T, Q> view(p);
  if (kKind != TargetKind::kProbabilities) check_labels(view);
  at::parallel_for(0, p.rows, view.grain(), [&](int64_t begin, int64_t end) {
    const auto pass = p.layout.is_rows() ? rows_bwd<T, Q, kKind> : pixels_bwd<T, Q, kKind>;
    pass(view, p, begin, end);
  });
}

// ---- double backward ----

// Per row, with <a, b> = sum_c a_c b_c:
//   grad_grad_output = <v, W p - w q> - (1 - s) <u, w (z - lse)>           (times the mean's 1 / n)
//   grad_input  = g W p (v - <p, v>) - g (1 - s) (w u - p <w, u>)
//   grad_target = g (1 - s) w (<p, v> - v)
template <class T, class Q, TargetKind kKind>
void double_backward(const CrossEntropyDoubleBackwardParams& p) {
  using Compute = CpuCompute<T>;
  constexpr bool kHasLabels = kKind != TargetKind::kProbabilities;
  const View<T, Q> view(p);
  if (kHasLabels) check_labels(view);
  const Compute* stats = static_cast<const Compute*>(p.stats);
  const Compute mean_scale = p.reduction == Reduction::kMean
                                 ? 1 / *static_cast<const Compute*>(p.total_weight)
                                 : Compute(1);
  at::parallel_for(0, p.rows, view.grain(), [&](int64_t begin, int64_t end) {
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
        static_cast<Compute*>(p.grad_grad_output)[row] = ignored ? Compute(0) : total * mean_scale;
      }
      const Compute grad = ignored ? Compute(0) : row_grad(view, p, row);
      for (int64_t c = 0; c < p.classes; ++c) {
        const int64_t at = start + c * p.layout.class_stride;
        const Compute w = view.weight_of(c), v_c = value_of(v, at);
        if (p.grad_input != nullptr) {
          const Compute prob = std::exp(distance(at)) / sum;
          static_cast<T*>(p.grad_input)[at] =
              static_cast<T>(grad * (row_mass * prob * (v_c - pv) -
                                     view.keep * (w * value_of(u, at) - prob * wu)));
        }
        if (p.grad_target != nullptr) {
          static_cast<Q*>(p.grad_target)[at] = static_cast<Q>(grad * view.keep * w * (pv - v_c));
        }
      }
    }
  });
}

// Calls f<T, Q, kKind>() for the problem's types; Q is the type of probabilities.
template <class F>
void for_problem(const CrossEntropyProblem& p, F&& f) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    switch (p.kind) {
      case TargetKind::kLabels:
        return f.template operator()<T, T, TargetKind::kLabels>();
      case TargetKind::kSmoothedLabels:
        return f.template operator()<T, T, TargetKind::kSmoothedLabels>();
      case TargetKind::kProbabilities:
        if (p.target_dtype == p.dtype) {
          return f.template operator()<T, T, TargetKind::kProbabilities>();
        }
        return f.template operator()<T, CpuCompute<T>, TargetKind::kProbabilities>();
    }
  });
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { forward<T, Q, kKind>(p); });
}

void cross_entropy_backward_cpu(const CrossEntropyBackwardParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { backward<T, Q, kKind>(p); });
}

void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { double_backward<T, Q, kKind>(p); });
}

}  // namespace warpwright
