// Rows are scanned four at a time, because each step waits for the one before it. Other dimensions
// are scanned by runs of columns, whose sums stay in the first-level cache.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/ceil_div.h"
#include "cpu/lanes.h"
#include "ops/scan/scan.h"

namespace warpwright {
namespace {

// The types of native's sums on the CPU: double for float, float for 16 bits. Integers are
// unsigned, because their sums may wrap.
template <class T>
struct ScanSumOf {
  using type = std::conditional_t<std::is_same_v<T, float>, double, CpuCompute<T>>;
};
template <>
struct ScanSumOf<int64_t> {
  using type = uint64_t;
};
template <class T>
using ScanSum = typename ScanSumOf<T>::type;

// One step: the next value from the last one and the step's input, single or in lanes.
struct AddStep {
  template <class V>
  static V next(V before, V x) {
    return before + x;
  }
  static constexpr int kFirst = 0;
};
struct MultiplyStep {
  template <class V>
  static V next(V before, V x) {
    return before * x;
  }
  static constexpr int kFirst = 1;
};
struct LogAddExpStep {
  template <class V>
  static V next(V a, V b) {
    if (a != a || b != b) return a + b;
    const V most = std::max(a, b), least = std::min(a, b);
    if (most == least && std::isinf(most)) return most;
    return most + std::log1p(std::exp(least - most));
  }
  static constexpr double kFirst = -std::numeric_limits<double>::infinity();
};

enum class Gates { kNone, kFactors, kLevels };

// The gate between the levels of two steps. Equal infinities let nothing through.
template <class T>
ScanSum<T> gate_between(T before, T level) {
  const auto difference = static_cast<ScanSum<T>>(level) - static_cast<ScanSum<T>>(before);
  return level == before && difference != difference ? ScanSum<T>(0) : std::exp(difference);
}

constexpr int64_t kRowsAtOnce = 4;
constexpr int64_t kColumnRun = 512;

// kRows neighbouring rows of `length` elements. `step` is 1 or -1; pointers are at the first step.
template <int kRows, class Step, Gates kGates, class T>
void scan_rows(const ScanParams& p, const T* input, const T* gate, const T* initial, T* output,
               int64_t step) {
  ScanSum<T> sums[kRows];
  std::fill_n(sums, kRows, static_cast<ScanSum<T>>(Step::kFirst));
  if (initial != nullptr) {
    for (int r = 0; r < kRows; ++r) sums[r] = static_cast<ScanSum<T>>(initial[r]);
  }
  const int64_t back = p.is_shifted ? step : 0;  // to the step whose gate this one has
  for (int64_t t = 0; t < p.length; ++t) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * p.length + t * step;
      if (kGates == Gates::kFactors && (t > 0 || initial != nullptr)) {
        sums[r] *= static_cast<ScanSum<T>>(gate[at - back]);
      }
      if (kGates == Gates::kLevels && t > 0) {
        sums[r] *= gate_between<T>(gate[at - step], gate[at]);
      }
      sums[r] = Step::next(sums[r], static_cast<ScanSum<T>>(input[at]));
      output[at] = static_cast<T>(sums[r]);
    }
  }
}

// One step of a run of columns. `gate`: of this step, or null. `before`: the levels before those.
template <class Step, Gates kGates, class T>
void add_columns(const T* __restrict__ input, const T* __restrict__ gate,
                 [[maybe_unused]] const T* __restrict__ before, T* __restrict__ output,
                 ScanSum<T>* __restrict__ sums, int64_t count) {
  int64_t c = 0;
  if constexpr (sizeof(T) == 2 && !std::is_same_v<Step, LogAddExpStep> &&
                kGates != Gates::kLevels) {
    for (; c + kLanes<T> <= count; c += kLanes<T>) {
      Values<T> sum;
      std::memcpy(&sum, sums + c, sizeof(sum));
      if constexpr (kGates == Gates::kFactors) sum *= load_lanes(gate + c);
      sum = Step::next(sum, load_lanes(input + c));
      std::memcpy(sums + c, &sum, sizeof(sum));
      store_lanes(output + c, sum);
    }
  }
  for (; c < count; ++c) {
    if constexpr (kGates == Gates::kFactors) sums[c] *= static_cast<ScanSum<T>>(gate[c]);
    if constexpr (kGates == Gates::kLevels) sums[c] *= gate_between<T>(before[c], gate[c]);
    sums[c] = Step::next(sums[c], static_cast<ScanSum<T>>(input[c]));
    output[c] = static_cast<T>(sums[c]);
  }
}

template <class T>
const T* at_or_null(const void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + offset;
}

template <class T, class Step, Gates kGates>
void scan_all_rows(const ScanParams& p) {
  const int64_t n = p.length, first = p.is_reversed ? n - 1 : 0, step = p.is_reversed ? -1 : 1;
  const int64_t groups = ceil_div(p.outer, kRowsAtOnce);
  auto scan = [&]<int kRows>(int64_t row) {
    const int64_t at = row * n + first;
    scan_rows<kRows, Step, kGates>(p, static_cast<const T*>(p.input) + at,
                                   at_or_null<T>(p.gate, at), at_or_null<T>(p.initial, row),
                                   static_cast<T*>(p.output) + at, step);
  };
  at::parallel_for(0, groups, grain(kRowsAtOnce * n), [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * kRowsAtOnce, p.outer);
    int64_t row = begin * kRowsAtOnce;
    for (; row + kRowsAtOnce <= last; row += kRowsAtOnce) {
      scan.template operator()<kRowsAtOnce>(row);
    }
    for (; row < last; ++row) scan.template operator()<1>(row);
  });
}

// `count` columns from `base` on, whose sums are in `sums`.
template <class T, class Step, Gates kGates>
void scan_run_of_columns(const ScanParams& p, int64_t base, ScanSum<T>* sums, int64_t count) {
  const int64_t step = p.is_reversed ? -p.inner : p.inner;
  const int64_t back = p.is_shifted ? step : 0;
  for (int64_t t = 0; t < p.length; ++t) {
    const int64_t at = base + (p.is_reversed ? p.length - 1 - t : t) * p.inner;
    const auto* input = static_cast<const T*>(p.input) + at;
    auto* output = static_cast<T*>(p.output) + at;
    constexpr const T* kAbsent = nullptr;
    if (kGates == Gates::kNone || (t == 0 && p.initial == nullptr)) {
      add_columns<Step, Gates::kNone>(input, kAbsent, kAbsent, output, sums, count);
    } else {
      const T* gate = static_cast<const T*>(p.gate) + at - back;
      const T* before = kGates == Gates::kLevels ? gate - step : kAbsent;
      add_columns<Step, kGates>(input, gate, before, output, sums, count);
    }
  }
}

template <class T, class Step, Gates kGates>
void scan_all_columns(const ScanParams& p) {
  const int64_t runs = ceil_div(p.inner, kColumnRun);
  const int64_t width = ceil_div(p.inner, runs);  // equal shares
  const int64_t elements = p.length * width;
  at::parallel_for(0, p.outer * runs, grain(elements), [&](int64_t begin, int64_t end) {
    std::vector<ScanSum<T>> sums(static_cast<size_t>(width));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outer = i / runs, column = i % runs * width;
      const int64_t count = std::min(width, p.inner - column);
      std::fill(sums.begin(), sums.end(), static_cast<ScanSum<T>>(Step::kFirst));
      if (p.initial != nullptr) {
        const T* initial = static_cast<const T*>(p.initial) + outer * p.inner + column;
        for (int64_t c = 0; c < count; ++c) {
          sums[static_cast<size_t>(c)] = static_cast<ScanSum<T>>(initial[c]);
        }
      }
      scan_run_of_columns<T, Step, kGates>(p, outer * p.length * p.inner + column, sums.data(),
                                           count);
    }
  });
}

template <class T, class Step, Gates kGates>
void scan_as(const ScanParams& p) {
  if (p.inner == 1) {
    scan_all_rows<T, Step, kGates>(p);
  } else {
    scan_all_columns<T, Step, kGates>(p);
  }
}

}  // namespace

void scan_cpu(const ScanParams& p) {
  if (p.dtype == DType::kInt64) {
    if (p.kind == ScanKind::kProduct) return scan_as<int64_t, MultiplyStep, Gates::kNone>(p);
    return scan_as<int64_t, AddStep, Gates::kNone>(p);
  }
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if (p.is_levels) return scan_as<T, AddStep, Gates::kLevels>(p);
    if (p.gate != nullptr) return scan_as<T, AddStep, Gates::kFactors>(p);
    switch (p.kind) {
      case ScanKind::kSum:
        return scan_as<T, AddStep, Gates::kNone>(p);
      case ScanKind::kProduct:
        return scan_as<T, MultiplyStep, Gates::kNone>(p);
      case ScanKind::kLogSumExp:
        return scan_as<T, LogAddExpStep, Gates::kNone>(p);
    }
  });
}

}  // namespace warpwright
