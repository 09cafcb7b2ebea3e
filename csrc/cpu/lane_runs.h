// Rows of neighbouring elements, walked by registers of lanes with single elements at the end. One
// body serves both. Also sums of lanes in the compute type or in double.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/lanes.h"
#include "cpu/wide_lanes.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

// Partial sums and everything computed from them are double.
using Stat = double;

// Eight doubles in two registers. (GCC 12 takes a 64-byte vector type through memory.)
struct WideLanes {
  Values<double> low, high;

  WideLanes& operator+=(const WideLanes& b) {
    low += b.low;
    high += b.high;
    return *this;
  }
  friend WideLanes operator+(WideLanes a, const WideLanes& b) { return a += b; }
  friend WideLanes operator-(const WideLanes& a, const WideLanes& b) {
    return {a.low - b.low, a.high - b.high};
  }
  friend WideLanes operator-(const WideLanes& a, double b) { return {a.low - b, a.high - b}; }
  friend WideLanes operator*(const WideLanes& a, const WideLanes& b) {
    return {a.low * b.low, a.high * b.high};
  }
};

// Vector and Scalar have one interface, for a row's body and its tail. V holds elements in the
// compute type. W holds sums: in double (kDouble), or in the compute type for short runs.
template <class T, bool kDouble>
struct Vector {
  using Compute = CpuCompute<T>;
  using V = Values<T>;
  static constexpr bool kWidens = kDouble && !std::is_same_v<T, double>;
  using W = std::conditional_t<kWidens, WideLanes, V>;
  static constexpr int kCount = kLanes<T>;

  static V load(const T* source) { return load_lanes(source); }
  static void store(T* target, V value) { store_lanes(target, value); }
  static W load_wide(const T* source) { return widen<kWidens>(load(source)); }
  static V load_compute(const Compute* source) {
    V result;
    std::memcpy(&result, source, sizeof(result));
    return result;
  }
  static W load_stat(const Stat* source) {
    if constexpr (kWidens) {
      return load_doubles(source);
    } else if constexpr (std::is_same_v<T, double>) {
      return load(source);
    } else {
      V result;
      for (int i = 0; i < kCount; ++i) result[i] = static_cast<Compute>(source[i]);
      return result;
    }
  }
  static void store_stat(Stat* target, const W& value) {
    if constexpr (std::is_same_v<T, double>) {
      store(target, value);
    } else {
      store_doubles(target, as_doubles(value));
    }
  }
  static void add_stat(Stat* target, const W& value) {
    if constexpr (std::is_same_v<T, double>) {
      store(target, load(target) + value);
    } else {
      store_doubles(target, load_doubles(target) + as_doubles(value));
    }
  }
  static Stat total(const W& value) {
    Values<double> sums;
    if constexpr (std::is_same_v<T, double>) {
      sums = value;
    } else {
      const WideLanes wide = as_doubles(value);
      sums = wide.low + wide.high;
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }

 private:
  static WideLanes as_doubles(const W& value) {
    if constexpr (kWidens) {
      return value;
    } else {
      return widen<true>(value);
    }
  }
  // By halves: GCC 12 copies 64 bytes by 16, and then waits for them before it loads 32.
  static WideLanes load_doubles(const Stat* source) {
    WideLanes result;
    std::memcpy(&result.low, source, sizeof(result.low));
    std::memcpy(&result.high, source + 4, sizeof(result.high));
    return result;
  }
  static void store_doubles(Stat* target, const WideLanes& value) {
    std::memcpy(target, &value.low, sizeof(value.low));
    std::memcpy(target + 4, &value.high, sizeof(value.high));
  }
  template <bool kWiden>
  static auto widen(V x) {
    if constexpr (kWiden) {
#ifdef __AVX2__  // GCC 12 converts two elements at a time
      const auto raw = (__m256)x;
      return WideLanes{(Values<double>)_mm256_cvtps_pd(_mm256_castps256_ps128(raw)),
                       (Values<double>)_mm256_cvtps_pd(_mm256_extractf128_ps(raw, 1))};
#else
      return WideLanes{
          __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3), Values<double>),
          __builtin_convertvector(__builtin_shufflevector(x, x, 4, 5, 6, 7), Values<double>)};
#endif
    } else {
      return x;
    }
  }
};
template <class T>
struct Scalar {
  using V = CpuCompute<T>;
  using W = Stat;
  static constexpr int kCount = 1;

  static V load(const T* source) { return static_cast<V>(*source); }
  static void store(T* target, V value) { *target = static_cast<T>(value); }
  static W load_wide(const T* source) { return static_cast<W>(load(source)); }
  static V load_compute(const V* source) { return *source; }
  static W load_stat(const W* source) { return *source; }
  static void store_stat(W* target, W value) { *target = value; }
  static void add_stat(Stat* target, W value) { *target += value; }
};

#ifdef CPU_CAPABILITY_AVX512
// As Vector, with twice the lanes. Sums are in the compute type.
template <class T>
struct WideVector {
  using V = WideValues<T>;
  using W = V;
  static constexpr int kCount = 2 * kLanes<T>;

  static V load(const T* source) { return load_wide_lanes(source); }
  static void store(T* target, V value) { store_wide_lanes(target, value); }
  static W load_wide(const T* source) { return load(source); }
  static V load_compute(const CpuCompute<T>* source) { return load_wide_lanes(source); }
  static void add_stat(Stat* target, W value) {
    Vector<T, false>::add_stat(target, low_half<T>(value));
    Vector<T, false>::add_stat(target + kLanes<T>, high_half<T>(value));
  }
};
#endif

// Registers of a run. Those of AVX-512 have the same lanes.
constexpr int kRunRegisters = 4;

// Calls f<Access, kGroup>(begin) for runs of kGroup * Access::kCount neighbours that cover
// [0, extent). Access is Vector, or Scalar at the end. Whole runs are two WideVectors with AVX-512.
template <class T, bool kDouble, class F>
void for_runs(int64_t extent, F&& f) {
  constexpr int64_t kRun = kRunRegisters * kLanes<T>;
  int64_t i = 0;
  for (; i + kRun <= extent; i += kRun) {
#ifdef CPU_CAPABILITY_AVX512
    if constexpr (!kDouble) {
      f.template operator()<WideVector<T>, kRunRegisters / 2>(i);
      continue;
    }
#endif
    f.template operator()<Vector<T, kDouble>, kRunRegisters>(i);
  }
  for (; i + kLanes<T> <= extent; i += kLanes<T>) f.template operator()<Vector<T, kDouble>, 1>(i);
  for (; i < extent; ++i) f.template operator()<Scalar<T>, 1>(i);
}

// A result of a row's vectors in the compute type: lanes that each combine every kRun-th element
// of whole runs.
template <class T>
class RunLanes {
 public:
  using Compute = CpuCompute<T>;
  explicit RunLanes(Compute start = 0) {
    for (auto& lanes : part_) lanes = Register{} + start;
  }

  // Combines the lanes of register g of a run with `value`.
  template <class Access, class F>
  __attribute__((always_inline)) void add(int g, const typename Access::V& value, F&& combine) {
    if constexpr (sizeof(value) == sizeof(Register)) {
      part_[g] = combine(value, part_[g]);
    } else {
#ifdef CPU_CAPABILITY_AVX512
      part_[0] = with_low_half<T>(part_[0], combine(value, low_half<T>(part_[0])));
#endif
    }
  }

  // The lanes of all registers, combined to one register.
  template <class F>
  __attribute__((always_inline)) Values<T> combined(F&& combine) const {
#ifdef CPU_CAPABILITY_AVX512
    return combine(combine(low_half<T>(part_[0]), high_half<T>(part_[0])),
                   combine(low_half<T>(part_[1]), high_half<T>(part_[1])));
#else
    return combine(combine(part_[0], part_[1]), combine(part_[2], part_[3]));
#endif
  }

 private:
#ifdef CPU_CAPABILITY_AVX512
  using Register = WideValues<T>;
#else
  using Register = Values<T>;
#endif
  Register part_[kRunRegisters * sizeof(Values<T>) / sizeof(Register)];
};

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
