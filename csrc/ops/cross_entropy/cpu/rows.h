// Shared by the CPU passes of cross entropy: lanes of a row, the problem with its types, and the
// walk over pixels.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "cpu/capability.h"
#include "cpu/types.h"
#include "ops/cross_entropy/cross_entropy.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

using at::vec::Vectorized;

template <class T>
using Lanes = Vectorized<CpuCompute<T>>;

// The first `count` elements, then zeros. With AVX2, at::vec copies them through memory first, and
// the load of the copy waits for it.
template <class V>
V load_first(const typename V::value_type* source, int64_t count) {
#ifdef CPU_CAPABILITY_AVX2
  if constexpr (std::is_same_v<V, Vectorized<float>>) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
    return _mm256_maskload_ps(source, wanted);
  }
#endif
  return V::loadu(source, count);
}

// The first `count` lanes from memory; the others are zero.
template <class T>
Lanes<T> load_lanes(const T* source, int64_t count) {
  using Compute = CpuCompute<T>;
  if constexpr (std::is_same_v<T, Compute>) {
    return count == Lanes<T>::size() ? Lanes<T>::loadu(source)
                                     : load_first<Lanes<T>>(source, count);
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
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (std::is_same_v<V, Vectorized<float>>) {  // V::set has a branch per count
    const auto wanted = static_cast<__mmask16>((1u << count) - 1);
    return _mm512_mask_mov_ps(fill, wanted, value);
  }
#endif
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

// Reads a number through a pointer whose type, T or Compute, is known at run time.
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

inline int64_t label_of(const CrossEntropyProblem& p, int64_t row) {
  return p.target_dtype == DType::kUInt8 ? static_cast<const uint8_t*>(p.target)[row]
                                         : static_cast<const int64_t*>(p.target)[row];
}

// One problem with its types, from which every pass below starts.
template <class T, class Q>
struct CrossEntropyView {
  using Compute = CpuCompute<T>;

  explicit CrossEntropyView(const CrossEntropyProblem& problem)
      : p(problem),
        input(static_cast<const T*>(problem.input)),
        probabilities(static_cast<const Q*>(problem.target)),
        weight(static_cast<const Compute*>(problem.weight)),
        loss_is_compute(dtype_size(problem.loss_dtype) == sizeof(Compute)),
        keep(static_cast<Compute>(1 - problem.label_smoothing)),
        spread(static_cast<Compute>(problem.label_smoothing / problem.classes)) {}

  Compute weight_of(int64_t c) const { return weight == nullptr ? Compute(1) : weight[c]; }
  bool ignored(int64_t row) const { return label_of(p, row) == p.ignore_index; }
  // M = sum_c w_c q_c + 2 z_loss lse; 0 of an ignored row.
  Compute row_mass(const Compute* stats, int64_t row) const {
    if (p.kind != TargetKind::kProbabilities && ignored(row)) return Compute(0);
    const Compute mass =
        p.kind == TargetKind::kLabels ? weight_of(label_of(p, row)) : stats[2 * p.rows + row];
    if (p.z_loss == 0) return mass;
    return mass + static_cast<Compute>(2 * p.z_loss) * (stats[row] + std::log(stats[p.rows + row]));
  }
  // An exp costs as much as a few elements of other ops.
  int64_t rows_per_task() const { return grain(4 * p.classes); }

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
CpuCompute<T> row_grad(const CrossEntropyView<T, Q>& view, const Params& p, int64_t row) {
  using Compute = CpuCompute<T>;
  const bool per_row = p.reduction == LossReduction::kNone;
  const Compute grad = p.grad_output == nullptr
                           ? Compute(1)
                           : read_either<T>(p.grad_output, view.loss_is_compute, per_row ? row : 0);
  return p.reduction == LossReduction::kMean ? grad / *static_cast<const Compute*>(p.total_weight)
                                             : grad;
}

// Every label is a class or ignored; also sums what a mean divides by.
template <class T, class Q>
double check_labels(const CrossEntropyView<T, Q>& view) {
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

// ---- pixels ----

// A strip of up to kStrip neighbouring pixels at a time: each class is one contiguous read.
constexpr int64_t kStrip = 64;

template <class T, class F>
void for_strips(const CrossEntropyProblem& p, int64_t begin, int64_t end, F&& f) {
  for (int64_t row = begin; row < end;) {
    const int64_t left_in_image = p.layout.inner - row % p.layout.inner;
    const int64_t count = std::min({kStrip, left_in_image, end - row});
    f(row, count);
    row += count;
  }
}

// Calls f<T, Q, kKind>() for the problem's types; Q is the type of probabilities.
template <class F>
void for_problem(const CrossEntropyProblem& p, F&& f) {
  for_cpu_dtype(p.dtype, [&]<class T>() { for_target<T, CpuCompute<T>>(p, f); });
}

}  // namespace CPU_CAPABILITY

// What a forward finds per row, in the compute type: the maximum, sum_c exp(z_c - max),
// sum_c w_c q_c (z_c - max) and sum_c w_c q_c. The last two are not computed for labels; for
// smoothed ones they have the uniform part alone.
struct CrossEntropyRowSums {
  void *max, *sum, *linear, *mass;
};

// Rows [begin, end), by the calling thread.
WARPWRIGHT_DECLARE_LOOPS(void cross_entropy_forward_loops(const CrossEntropyProblem& p,
                                                          const CrossEntropyRowSums& rows,
                                                          int64_t begin, int64_t end);
                         void cross_entropy_backward_loops(const CrossEntropyBackwardParams& p,
                                                           int64_t begin, int64_t end);)

}  // namespace warpwright
