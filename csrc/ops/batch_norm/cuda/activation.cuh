// The activation after batch norm, and its derivative, for some elements of a vector. It is a value
// of the launch: all threads take the same branch, once for all of these elements.
//   relu        max(z, 0)                  1 if the stored output is positive or NaN, else 0
//   silu        z s, s = sigmoid(z)        s (1 + z (1 - s))
//   hardswish   z clamp(z + 3, 0, 6) / 6   0 up to -3, z / 3 + 1 / 2 below 3, else 1
// Infinities and NaN as in native's CUDA kernels: silu(-inf) is NaN, hardswish'(NaN) is 1.
#pragma once

#include <type_traits>

#include "device/activation.cuh"
#include "ops/batch_norm/batch_norm.h"

namespace warpwright {

// Elements of a vector of V that pass the activation together: independent chains for the latency
// of the special functions, few registers.
template <class T, int V>
constexpr int kActivationRun = sizeof(T) == 8 ? 1
                               : V < 4        ? V
                                              : 4;

// Native's rule, on the output as it is stored in T: not <= 0. Half of T's smallest number and less
// rounds to 0 (ties to even), so no conversion is needed. The converting instruction is as slow as
// an exponential. NaN passes.
template <class T>
constexpr float kRoundsToZero = std::is_same_v<T, half>   ? 0x1p-25f
                                : std::is_same_v<T, bf16> ? 0x1p-134f
                                                          : 0.0f;
template <class T, class A>
__device__ __forceinline__ bool passes_relu(A y) {
  return !(y <= A(kRoundsToZero<T>));
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
      const A s = reciprocal_within<kRounding>(A(1) + e);
      // Near 1, s has no bits of 1 - s left. The product with z then adds less than 16 bits show.
      const bool cancels = kRounding == Rounding::kFull && e <= A(1);
      const A rest = cancels ? e * s : A(1) - s;
      dout[j] *= s * (A(1) + z[j] * rest);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      // Selections of values at hand: the compiler would branch around products, per element.
      const A inside = z[j] * A(1.0 / 3) + A(0.5);
      const A product = dout[j] * (z[j] < A(3) ? inside : A(1));
      dout[j] = z[j] <= A(-3) ? A(0) : product;
    }
  }
}

}  // namespace warpwright
