// The loops of cross entropy's forward: vectorised over contiguous classes, else over pixels. A row
// is read twice, the second time from cache.
//
// exp_of may return any number for NaN. A row with NaN, +inf, or only -inf has a maximum that is
// not finite. Its sum is set to NaN by the caller, which makes its gradient NaN.
#include <numeric>

#include "cpu/exp.h"
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
  linear = first_lanes(linear, at::vec::fmadd(wq, distance, linear), count);
  mass = first_lanes(mass, mass + wq, count);
}

// Partial sums of a row. Their number does not depend on the registers' width, and so neither do
// the bits.
template <class T>
struct RowSums {
  static constexpr int64_t kLanes = Lanes<T>::size(),
                           kWidth = 64 / static_cast<int64_t>(sizeof(CpuCompute<T>)),
                           kParts = kWidth / kLanes;
  CompensatedSum<Lanes<T>> part[kParts];

  // In double. Next to a row's largest term, 1, each float addition would round off part of the
  // rest. The gradient of a nearly certain label consists of that rest.
  CpuCompute<T> total() const {
    CpuCompute<T> lanes[kWidth];
    for (int64_t i = 0; i < kParts; ++i) part[i].sum.store(lanes + i * kLanes);
    if constexpr (std::is_same_v<T, double>) return std::accumulate(lanes, lanes + kWidth, 0.0);
    double sums[4] = {};  // an addition waits for the one before it
    for (int64_t i = 0; i < kWidth; ++i) sums[i % 4] += static_cast<double>(lanes[i]);
    return static_cast<CpuCompute<T>>((sums[0] + sums[2]) + (sums[1] + sums[3]));
  }
};

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
  constexpr int64_t kLanes = Lanes<T>::size(), kWidth = RowSums<T>::kWidth;
  const int64_t classes = view.p.classes;
  for (int64_t row = begin; row < end; ++row) {
    const T* z = view.input + row_offset(view.p.layout, row);
    row_max[row] = max_of_row<T>(z, classes);
    const Lanes<T> shift(row_max[row]);
    const int64_t target_start =
        kKind == TargetKind::kProbabilities ? row_offset(view.p.target_layout, row) : 0;
    RowSums<T> sum, linear, mass;
    for (int64_t first = 0; first < classes; first += kSumBlock * kWidth) {
      const int64_t last = std::min(classes, first + kSumBlock * kWidth);
      for (int64_t part = 0; part < RowSums<T>::kParts; ++part) {
        Lanes<T> block_sum(Compute(0)), block_linear(Compute(0)), block_mass(Compute(0));
        for (int64_t c = first + part * kLanes; c < last; c += kWidth) {
          const int64_t count = std::min(kLanes, last - c);
          const Lanes<T> distance = load_lanes<T>(z + c, count) - shift;
          block_sum = block_sum + first_lanes(Lanes<T>(Compute(0)), exp_of(distance), count);
          if constexpr (kKind != TargetKind::kLabels) {
            add_linear<kKind>(view, distance, target_start, c, count, block_linear, block_mass);
          }
        }
        sum.part[part].add(block_sum);
        if constexpr (kKind != TargetKind::kLabels) {
          linear.part[part].add(block_linear);
          mass.part[part].add(block_mass);
        }
      }
    }
    row_sum[row] = sum.total();
    if constexpr (kKind != TargetKind::kLabels) {
      linear_of[row] = linear.total();
      mass_of[row] = mass.total();
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
    alignas(64) Compute max[kStrip];
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
      alignas(64) Compute block_sum[kStrip] = {}, block_linear[kStrip] = {},
                          block_mass[kStrip] = {};
      for (int64_t c = first; c < std::min(p.classes, first + kSumBlock); ++c) {
        const Lanes<T> w(view.weight_of(c));
        for (int64_t i = 0; i < strip; i += kLanes) {
          const int64_t count = std::min(kLanes, strip - i);
          const Lanes<T> value = load_lanes<T>(z + c * p.layout.class_stride + i, count);
          const Lanes<T> distance = value - Lanes<T>::loadu(max + i);
          add_to(block_sum + i, exp_of(distance));
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

}  // namespace

namespace CPU_CAPABILITY {

void cross_entropy_forward_loops(const CrossEntropyProblem& p, const CrossEntropyRowSums& rows,
                                 int64_t begin, int64_t end) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() {
    using Compute = CpuCompute<T>;
    const CrossEntropyView<T, Q> view(p);
    const auto pass = p.layout.is_rows() ? rows_fwd<T, Q, kKind> : pixels_fwd<T, Q, kKind>;
    pass(view, begin, end, static_cast<Compute*>(rows.max), static_cast<Compute*>(rows.sum),
         static_cast<Compute*>(rows.linear), static_cast<Compute*>(rows.mass));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
