// Shared by the cross-entropy kernels: the target of a row, and loads and stores of its numbers.
#pragma once

#include "device/error_word.cuh"
#include "device/exp.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/cross_entropy/cross_entropy.h"

namespace warpwright {

// Factors of the smoothed target q = keep * target + spread, computed on the host: no division in a
// thread.
template <class Acc>
struct Smoothing {
  Acc keep;    // 1 - s
  Acc spread;  // s / C

  explicit Smoothing(const CrossEntropyProblem& p)
      : keep(static_cast<Acc>(1 - p.label_smoothing)),
        spread(p.label_smoothing == 0 ? Acc(0) : static_cast<Acc>(p.label_smoothing / p.classes)) {}
};

// Accesses in flight per thread: as many as fit the registers of 1024 threads per SM (float64: 512)
// without spilling.
template <class T, TargetKind kKind, int kVec>
constexpr int kCrossEntropyUnroll = [] {
  const int elements = kKind != TargetKind::kLabels ? 4 : 32 / static_cast<int>(sizeof(T));
  return kVec >= elements ? 1 : elements / kVec < 8 ? elements / kVec : 8;
}();
// Minimum blocks of kMaxCrossEntropyThreads per SM.
template <class T>
constexpr int kCrossEntropyBlocks = sizeof(T) == 8 ? 1 : 2;

__device__ __forceinline__ float infinity(float) { return __int_as_float(0x7f800000); }
__device__ __forceinline__ double infinity(double) {
  return __longlong_as_double(0x7ff0000000000000ll);
}
__device__ __forceinline__ float quiet_nan(float) { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ double quiet_nan(double) {
  return __longlong_as_double(0x7fffffffffffffffll);
}

// Loads kCount contiguous elements and converts them, in 16-byte accesses if they fill one.
template <int kCount, class T>
__device__ __forceinline__ void load_converted(const T* source, Accum<T> (&out)[kCount]) {
  constexpr int kStep = kCount < kVecSize<T> ? kCount : kVecSize<T>;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const Vec<T, kStep> loaded = load_vec<kStep>(source + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) out[i + j] = convert<Accum<T>>(loaded[j]);
  }
}

template <int kCount, class T, class Acc>
__device__ __forceinline__ void store_converted(T* destination, const Acc (&values)[kCount]) {
  constexpr int kStep = kCount < kVecSize<T> ? kCount : kVecSize<T>;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    Vec<T, kStep> stored;
#pragma unroll
    for (int j = 0; j < kStep; ++j) stored[j] = convert<T>(values[i + j]);
    store_vec(destination + i, stored);
  }
}

constexpr int kLineBytes = 128;

// How many elements of a row come before its first multiple of `bytes`, a power of two.
template <class T>
__device__ __forceinline__ int scalar_head(const T* row, int64_t classes, int bytes) {
  const int head = static_cast<int>(-reinterpret_cast<uintptr_t>(row) & (bytes - 1)) /
                   static_cast<int>(sizeof(T));
  return head < classes ? head : static_cast<int>(classes);
}

// ---- targets ----

struct Label {
  int64_t value;
  bool ignored;
  bool valid;  // a class; if neither is set, the label is bad
};

__device__ __forceinline__ int64_t load_label_value(const CrossEntropyProblem& p, int64_t row) {
  return p.target_dtype == DType::kUInt8
             ? static_cast<int64_t>(static_cast<const uint8_t*>(p.target)[row])
             : static_cast<const int64_t*>(p.target)[row];
}

// Tests the range in 64 bits. A bad label is never used as an address.
__device__ __forceinline__ Label label_of(const CrossEntropyProblem& p, int64_t value) {
  const bool ignored = value == p.ignore_index;
  return {value, ignored, !ignored && value >= 0 && value < p.classes};
}

__device__ __forceinline__ Label load_label(const CrossEntropyProblem& p, int64_t row) {
  return label_of(p, load_label_value(p, row));
}

template <class Acc>
__device__ __forceinline__ Acc class_weight(const CrossEntropyProblem& p, int64_t c) {
  return p.weight == nullptr ? Acc(1) : static_cast<const Acc*>(p.weight)[c];
}

// Loads a number whose type, T or Accum<T>, is known at run time.
template <class T>
__device__ __forceinline__ Accum<T> read_either(const void* data, DType type, int64_t i) {
  constexpr bool kLow = sizeof(T) == 2;
  if (!kLow || type == DType::kFloat32) return static_cast<const Accum<T>*>(data)[i];
  return convert<Accum<T>>(static_cast<const T*>(data)[i]);
}
template <class T>
__device__ __forceinline__ void write_either(void* data, DType type, int64_t i, Accum<T> value) {
  constexpr bool kLow = sizeof(T) == 2;
  if (!kLow || type == DType::kFloat32) {
    static_cast<Accum<T>*>(data)[i] = value;
  } else {
    static_cast<T*>(data)[i] = convert<T>(value);
  }
}

// w q of class c, without the label's own share. `target` is the probability.
template <TargetKind kKind, class Acc>
__device__ __forceinline__ Acc weighted_target(const CrossEntropyProblem& p,
                                               const Smoothing<Acc>& smoothing, int64_t c,
                                               Acc target) {
  if constexpr (kKind == TargetKind::kLabels) {
    return Acc(0);
  } else {
    const Acc q = kKind == TargetKind::kProbabilities ? smoothing.spread + smoothing.keep * target
                                                      : smoothing.spread;
    return q * class_weight<Acc>(p, c);
  }
}

// Calls f<T, Q, kKind>() for the problem's types. Q is the type of probabilities.
template <class F>
void for_cross_entropy(const CrossEntropyProblem& p, F&& f) {
  for_dtype(p.dtype, [&]<class T>() { for_target<T, Accum<T>>(p, f); });
}

}  // namespace warpwright
