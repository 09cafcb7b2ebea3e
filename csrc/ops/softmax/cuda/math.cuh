// Shared by the kernels of softmax: the pairs of types, maxima, and the sum of exponentials
// relative to a maximum that may still grow.
#pragma once

#include <limits>

#include "device/access.cuh"
#include "device/exp.cuh"
#include "device/reduce.cuh"
#include "ops/softmax/softmax.h"

namespace warpwright {

// Calls f<T, O>() with the types of the input and the output.
template <class F>
void for_softmax_types(const SoftmaxShape& p, F&& f) {
  for_dtype(p.dtype, [&]<class T>() {
    if (p.output_dtype == p.dtype) return f.template operator()<T, T>();
    if constexpr (sizeof(T) == 2) {
      if (p.output_dtype == DType::kFloat32) return f.template operator()<T, float>();
    }
    throw std::logic_error("softmax: no kernel for this pair of types");
  });
}

// One instruction in float. NaN does not reach the result; it reaches the sum of exponentials.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

template <class Acc>
__device__ __forceinline__ Acc lowest() {
  return -std::numeric_limits<Acc>::infinity();
}

// What exponentials are relative to: with only -inf so far, exp(x - reference) is 0 and not NaN.
template <class Acc>
__device__ __forceinline__ Acc reference_of(Acc maximum) {
  return maximum == lowest<Acc>() ? Acc(0) : maximum;
}

// The maximum of the values so far, and their sum of exp(x - maximum). O decides how exact the
// exponentials are.
template <class O>
struct OnlineSum {
  using Acc = Accum<O>;
  Acc maximum = lowest<Acc>(), sum = 0;

  // The sum moves to a larger maximum.
  __device__ __forceinline__ void raise(Acc next) {
    if (next > maximum) {
      sum *= exp_for<O>(maximum - next);
      maximum = next;
    }
  }
  template <int kVec>
  __device__ __forceinline__ void add(const Vec<Acc, kVec>& x) {
    Acc next = x[0];
#pragma unroll
    for (int j = 1; j < kVec; ++j) next = larger(next, x[j]);
    raise(next);
    const Acc reference = reference_of(maximum);
    sum += tree_sum<kVec>([&](int j) { return exp_for<O>(x[j] - reference); });
  }
};

// The last step of a value: its share of the row, or the share's logarithm. `scale` is 1 / sum, or
// log(sum).
template <class O, bool kLog>
__device__ __forceinline__ Accum<O> softmax_of(Accum<O> x, Accum<O> maximum, Accum<O> scale) {
  if constexpr (kLog) {
    return x - maximum - scale;
  } else {
    return exp_for<O>(x - maximum) * scale;
  }
}
template <bool kLog, class Acc>
__device__ __forceinline__ Acc softmax_scale(Acc sum) {
  if constexpr (kLog) {
    return log(sum);
  } else {
    return Acc(1) / sum;
  }
}

// What the backward adds up, and its result.
template <bool kLog, class Acc>
__device__ __forceinline__ Acc softmax_term(Acc y, Acc dy) {
  return kLog ? dy : y * dy;
}
template <class O, bool kLog>
__device__ __forceinline__ Accum<O> softmax_gradient(Accum<O> y, Accum<O> dy, Accum<O> sum) {
  if constexpr (kLog) {
    return dy - exp_for<O>(y) * sum;
  } else {
    return y * (dy - sum);
  }
}

// Stores kVec values as type To, in 16-byte stores if they fill one.
template <class To, int kVec, class Acc>
__device__ __forceinline__ void store_converted(To* target, const Vec<Acc, kVec>& values) {
  constexpr int kStep = kVec < kVecSize<To> ? kVec : kVecSize<To>;
#pragma unroll
  for (int i = 0; i < kVec; i += kStep) {
    Vec<To, kStep> part;
#pragma unroll
    for (int j = 0; j < kStep; ++j) part[j] = convert<To>(values[i + j]);
    store_vec_global(target + i, part);
  }
}

// kCount vectors, `step` elements apart.
template <int kVec, int kCount, class T>
struct VectorBatch {
  Vec<T, kVec> of[kCount];

  __device__ __forceinline__ VectorBatch(const T* first, int64_t step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = load_vec<kVec>(first + i * step);
  }
};

// Elements before a row's first aligned vector.
template <int kVec, class T>
__device__ __forceinline__ int row_head(const T* row) {
  if constexpr (kVec == 1) return 0;
  return static_cast<int>(-reinterpret_cast<uintptr_t>(row) & 15) / static_cast<int>(sizeof(T));
}

// Calls f<kVec, kCount>(column, step) for the vectors of a row that begins anywhere. The threads of
// the block share the vectors. A call takes kCount of them, `step` elements apart, so that their
// loads are in flight together. Elements before the first and after the last aligned address come
// one by one.
template <int kVec, class T, class F>
__device__ __forceinline__ void for_row_vectors(const T* row, int64_t length, F&& f) {
  const int head = row_head<kVec>(row);
  const int64_t vectors = (length - head) / kVec;
  const int64_t tail = head + vectors * kVec;
  const int64_t step = int64_t{blockDim.x} * kVec;
  constexpr int kCount = 4;
  if (static_cast<int>(threadIdx.x) < head) f.template operator()<1, 1>(int64_t{threadIdx.x}, step);
  int64_t v = threadIdx.x;
  for (; v + (kCount - 1) * int64_t{blockDim.x} < vectors; v += kCount * int64_t{blockDim.x}) {
    f.template operator()<kVec, kCount>(head + v * kVec, step);
  }
  for (; v < vectors; v += blockDim.x) f.template operator()<kVec, 1>(head + v * kVec, step);
  if constexpr (kVec > 1) {
    if (tail + threadIdx.x < length) f.template operator()<1, 1>(tail + threadIdx.x, step);
  }
}

}  // namespace warpwright
