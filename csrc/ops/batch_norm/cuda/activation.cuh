// The activation after batch norm, and its derivative, for the elements of a vector. It is a value
// of the launch: all threads take the same branch, once per vector.
//   relu        max(z, 0)               1 if the stored output is positive or NaN, else 0
//   silu        z s, s = sigmoid(z)     s (1 + z (1 - s))
//   hardswish   z clamp(z + 3, 0, 6) / 6     0 up to -3, z / 3 + 1 / 2 below 3, else 1
// Infinities and NaN as in native's CUDA kernels: silu(-inf) is NaN, hardswish's derivative at
// NaN 1.
#pragma once

#include "device/activation.cuh"
#include "ops/batch_norm/batch_norm.h"

namespace warpwright {

// Elements of a vector of V that pass the activation together: independent chains for the latency
// of the special functions, few registers.
template <class T, int V>
constexpr int kActivationRun = sizeof(T) == 8 ? 1
                               : V < 4        ? V
                                              : 4;

// Native's rule, on the stored output.
template <class T, class A>
__device__ __forceinline__ bool passes_relu(A y) {
  return !(convert<A>(convert<T>(y)) <= A(0));
}

template <class T, int kCount, class A>
__device__ __forceinline__ void activate_norm(NormActivation activation, A (&y)[kCount]) {
  if (activation == NormActivation::kRelu) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) y[j] = y[j] < 0 ? A(0) : y[j];  // NaN remains
  } else if (activation == NormActivation::kSilu) {
    constexpr Rounding kRounding = kRoundingOf<T>;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      y[j] = divide_within<kRounding>(y[j], A(1) + exp_within<kRounding>(-y[j]));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      A clamped = y[j] + A(3);
      clamped = clamped < A(0) ? A(0) : clamped > A(6) ? A(6) : clamped;
      y[j] = y[j] * clamped * A(1.0 / 6);
    }
  }
}

// dout[j] *= the derivative at z[j].
template <class T, int kCount, class A>
__device__ __forceinline__ void activate_norm_backward(NormActivation activation,
                                                       const A (&z)[kCount], A (&dout)[kCount]) {
  if (activation == NormActivation::kRelu) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) dout[j] = passes_relu<T>(z[j]) ? dout[j] : A(0);
  } else if (activation == NormActivation::kSilu) {
    constexpr Rounding kRounding = kRoundingOf<T>;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const A e = exp_within<kRounding>(-z[j]);
      const A s = divide_within<kRounding>(A(1), A(1) + e);
      const A rest = e <= A(1) ? e * s : A(1) - s;  // 1 - s, without cancellation
      dout[j] *= s * (A(1) + z[j] * rest);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const A inside = dout[j] * (z[j] * A(1.0 / 3) + A(0.5));
      dout[j] = z[j] <= A(-3) ? A(0) : z[j] < A(3) ? inside : dout[j];
    }
  }
}

}  // namespace warpwright
