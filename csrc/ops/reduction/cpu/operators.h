// What a reduction combines on the CPU. States are double; elements are combined in the compute
// type in blocks that stay in the first-level cache. An operator has
//   absorb_run    adds neighbouring elements of one output
//   absorb_block  adds up to kBlockRows rows, x(0) and so on, to the states of neighbouring columns
//   kStreams      combine() joins rows one after the other, which reads memory in order
//   merge, result
#pragma once

#include <cmath>
#include <limits>

#include "cpu/exp.h"
#include "cpu/fold_lanes.h"
#include "cpu/lane_runs.h"
#include "ops/reduction/reduction.h"

namespace warpwright {

constexpr int64_t kBlock = 1024;    // elements of a run
constexpr int64_t kBlockRows = 16;  // rows of columns

// Of a sum: first. Of a maximum: first. Log-sum-exp: reference and sum of exp(x - reference).
// Variance: mean and sum of squared deviations.
struct CpuState {
  double first, second, count;
};

// The total of the lanes of term(0), term(1) and so on for a run of `count` elements: four
// registers of lanes, then single elements.
template <class T, class Lanes, class Single>
inline __attribute__((always_inline)) double run_total(int64_t count, Lanes&& lanes_at,
                                                       Single&& single_at) {
  constexpr int64_t kStep = kLanes<T>;
  Values<T> a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kStep <= count; i += 4 * kStep) {
    a += lanes_at(i);
    b += lanes_at(i + kStep);
    c += lanes_at(i + 2 * kStep);
    d += lanes_at(i + 3 * kStep);
  }
  for (; i + kStep <= count; i += kStep) a += lanes_at(i);
  double total = Vector<T, false>::total((a + b) + (c + d));
  for (; i < count; ++i) total += single_at(i);
  return total;
}

template <class T>
struct CpuSum {
  using C = CpuCompute<T>;
  static constexpr bool kStreams = true;
  static Values<T> combine(Values<T> a, Values<T> b) { return a + b; }
  static CpuState identity() { return {0, 0, 0}; }
  static void absorb_run(const T* x, int64_t count, CpuState& state) {
    state.first += run_total<T>(
        count, [&](int64_t i) { return load_lanes(x + i); },
        [&](int64_t i) { return static_cast<C>(x[i]); });
  }
  template <class Rows>
  static void absorb_block(const Rows& x, int64_t rows, double* first, double*, double) {
    Values<T> sum = x(0);
    for (int64_t r = 1; r < rows; ++r) sum += x(r);
    Vector<T, false>::add_stat(first, sum);
  }
  static void merge(CpuState& a, const CpuState& b) { a.first += b.first; }
  static double result(const CpuState& state, const ReductionParams& p) {
    return state.first / reduction_divisor(p);
  }
};

// Keeps NaN.
template <class V>
V larger(V a, V b) {
  using Bits = decltype(a != a);
  const V most = a > b ? a : b;             // b if one of them is NaN
  return (V)((Bits)most | (Bits)(a != a));  // all bits set is NaN, too
}
inline double larger(double a, double b) { return (b > a) | (b != b) ? b : a; }

template <class T>
struct CpuMax {
  using C = CpuCompute<T>;
  static constexpr bool kStreams = true;
  static Values<T> combine(Values<T> a, Values<T> b) { return larger<Values<T>>(a, b); }
  static CpuState identity() { return {-std::numeric_limits<double>::infinity(), 0, 0}; }
  static void absorb_run(const T* x, int64_t count, CpuState& state) {
    int64_t i = 0;
    if (count >= kLanes<T>) {
      constexpr int64_t kStep = kLanes<T>;
      Values<T> most = load_lanes(x), b = most, c = most, d = most;
      for (; i + 4 * kStep <= count; i += 4 * kStep) {
        most = combine(most, load_lanes(x + i));
        b = combine(b, load_lanes(x + i + kStep));
        c = combine(c, load_lanes(x + i + 2 * kStep));
        d = combine(d, load_lanes(x + i + 3 * kStep));
      }
      for (; i + kStep <= count; i += kStep) most = combine(most, load_lanes(x + i));
      most = combine(combine(most, b), combine(c, d));
      state.first = larger(state.first, static_cast<double>(fold_lanes<T>(most, combine)));
    }
    for (; i < count; ++i) {
      state.first = larger(state.first, static_cast<double>(static_cast<C>(x[i])));
    }
  }
  template <class Rows>
  static void absorb_block(const Rows& x, int64_t rows, double* first, double*, double) {
    Values<T> most = x(0);
    for (int64_t r = 1; r < rows; ++r) most = combine(most, x(r));
    for (int k = 0; k < kLanes<T>; ++k) {
      first[k] = larger(first[k], static_cast<double>(most[k]));
    }
  }
  static void merge(CpuState& a, const CpuState& b) { a.first = larger(a.first, b.first); }
  static double result(const CpuState& state, const ReductionParams&) { return state.first; }
};

// How often the maximum occurs. NaN equals nothing: with NaN it is 0.
template <class T>
struct CpuMaxCount {
  using C = CpuCompute<T>;
  static constexpr bool kStreams = false;
  static CpuState identity() { return CpuMax<T>::identity(); }
  static void absorb_run(const T* x, int64_t count, CpuState& state) {
    CpuState block = identity();
    CpuMax<T>::absorb_run(x, count, block);
    const auto most = static_cast<C>(block.first);
    block.second = run_total<T>(
        count, [&](int64_t i) { return ones(load_lanes(x + i) == most); },
        [&](int64_t i) { return static_cast<C>(x[i]) == most ? 1 : 0; });
    merge(state, block);
  }
  template <class Rows>
  static void absorb_block(const Rows& x, int64_t rows, double* first, double* second, double) {
    Values<T> most = x(0), times{};
    for (int64_t r = 1; r < rows; ++r) most = CpuMax<T>::combine(most, x(r));
    for (int64_t r = 0; r < rows; ++r) times += ones(x(r) == most);
    for (int k = 0; k < kLanes<T>; ++k) {
      CpuState state{first[k], second[k], 0};
      merge(state, {static_cast<double>(most[k]), static_cast<double>(times[k]), 0});
      first[k] = state.first;
      second[k] = state.second;
    }
  }
  static void merge(CpuState& a, const CpuState& b) {
    const double most = larger(a.first, b.first);
    a.second = (a.first == most ? a.second : 0) + (b.first == most ? b.second : 0);
    a.first = most;
  }
  static double result(const CpuState& state, const ReductionParams&) { return state.second; }

 private:
  static Values<T> ones(Mask<T> mask) { return mask ? Values<T>{} + 1 : Values<T>{}; }
};

template <class T>
struct CpuLogSumExp {
  using C = CpuCompute<T>;
  static constexpr bool kStreams = false;
  static constexpr C kLargest = std::numeric_limits<C>::max();

  static CpuState identity() { return {-kLargest, 0, 0}; }
  static Values<T> power(Values<T> x) {
    if constexpr (std::is_same_v<C, float>) {
      return exp_lanes(x);
    } else {
      double lanes[kLanes<T>];
      std::memcpy(lanes, &x, sizeof(x));
      at::vec::Vectorized<double>::loadu(lanes).exp().store(lanes);
      std::memcpy(&x, lanes, sizeof(x));
      return x;
    }
  }
  static C power(C x) { return std::exp(x); }
  // The reference stays finite, and NaN does not become one.
  static Values<T> reference(Values<T> old, Values<T> x) {
    x = x > old ? x : old;
    return x > kLargest ? Values<T>{} + kLargest : x;
  }
  static void absorb_run(const T* x, int64_t count, CpuState& state) {
    Values<T> most = Values<T>{} + static_cast<C>(state.first);
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) most = reference(most, load_lanes(x + i));
    C to = most[0];
    for (int k = 1; k < kLanes<T>; ++k) to = std::max<C>(to, most[k]);
    for (; i < count; ++i) {
      const C value = static_cast<C>(x[i]);
      if (value > to) to = std::min(value, kLargest);
    }
    const double sum = run_total<T>(
        count, [&](int64_t j) { return power(load_lanes(x + j) - to); },
        [&](int64_t j) { return power(static_cast<C>(x[j]) - to); });
    merge(state, {to, sum, 0});
  }
  template <class Rows>
  static void absorb_block(const Rows& x, int64_t rows, double* first, double* second, double) {
    Values<T> old;
    for (int k = 0; k < kLanes<T>; ++k) old[k] = static_cast<C>(first[k]);
    Values<T> to = old;
    for (int64_t r = 0; r < rows; ++r) to = reference(to, x(r));
    Values<T> sum = power(x(0) - to);
    for (int64_t r = 1; r < rows; ++r) sum += power(x(r) - to);
    const Values<T> scale = power(old - to);
    for (int k = 0; k < kLanes<T>; ++k) {
      first[k] = to[k];
      second[k] = second[k] * scale[k] + sum[k];
    }
  }
  static void merge(CpuState& a, const CpuState& b) {
    const double to = std::max(a.first, b.first);
    a.second = a.second * std::exp(a.first - to) + b.second * std::exp(b.first - to);
    a.first = to;
  }
  static double result(const CpuState& state, const ReductionParams&) {
    return state.first + std::log(state.second);
  }
};

// Lanes in double for float, as native has them; in float for 16 bits.
template <class T>
struct CpuVar {
  using C = std::conditional_t<sizeof(T) == 2, float, double>;
  static constexpr bool kStreams = false;
  static CpuState identity() { return {0, 0, 0}; }
  // The total of term(x) over a run. Eight sums, which the compiler puts into registers of lanes.
  template <class Term>
  static double total(const T* x, int64_t count, Term&& term) {
    C sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (int k = 0; k < 8; ++k) sums[k] += term(static_cast<C>(x[i + k]));
    }
    double sum = 0;
    for (int k = 0; k < 8; ++k) sum += sums[k];
    for (; i < count; ++i) sum += term(static_cast<C>(x[i]));
    return sum;
  }
  static void absorb_run(const T* x, int64_t count, CpuState& state) {
    const auto size = static_cast<double>(count);
    const C mean = static_cast<C>(total(x, count, [](C v) { return v; }) / size);
    const double rest = total(x, count, [&](C v) { return v - mean; }) / size;
    const double squares = total(x, count, [&](C v) { return (v - mean) * (v - mean); });
    merge(state, {static_cast<double>(mean) + rest, squares - size * rest * rest, size});
  }
  template <class Rows>
  static void absorb_block(const Rows& x, int64_t rows, double* first, double* second,
                           double before) {
    constexpr int kCount = kLanes<T>;
    C mean[kCount] = {}, squares[kCount] = {};
    for (int64_t r = 0; r < rows; ++r) {
      for (int k = 0; k < kCount; ++k) mean[k] += static_cast<C>(x(r)[k]);
    }
    for (int k = 0; k < kCount; ++k) mean[k] /= static_cast<C>(rows);
    for (int64_t r = 0; r < rows; ++r) {
      for (int k = 0; k < kCount; ++k) {
        const C d = static_cast<C>(x(r)[k]) - mean[k];
        squares[k] += d * d;
      }
    }
    const double share = static_cast<double>(rows) / (before + static_cast<double>(rows));
    for (int k = 0; k < kCount; ++k) {
      const double distance = mean[k] - first[k];
      first[k] += distance * share;
      second[k] += squares[k] + distance * before * share * distance;
    }
  }
  // Chan, Golub & LeVeque 1979, eq. 2.1.
  static void merge(CpuState& a, const CpuState& b) {
    if (b.count == 0) return;
    const double share = b.count / (a.count + b.count), distance = b.first - a.first;
    a.first += distance * share;
    a.second += b.second + distance * a.count * share * distance;
    a.count += b.count;
  }
  static double result(const CpuState& state, const ReductionParams& p) {
    const double variance = state.second / reduction_divisor(p);
    return p.kind == ReductionKind::kStd ? std::sqrt(variance) : variance;
  }
};

}  // namespace warpwright
