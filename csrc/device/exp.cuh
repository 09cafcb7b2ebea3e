// The exponential function at the cost that its caller's precision needs.
#pragma once

#include "device/types.cuh"

namespace warpwright {

constexpr float kLog2E = 1.44269504088896340736f;

// PTX ISA "ex2": relative error below 2^-22; results below the smallest normal number become 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp of an accumulator, as exact as results of type T can show: rounding to 16 bits hides 2^-22,
// a float result does not. NaN stays NaN, -inf gives 0.
template <class T>
__device__ __forceinline__ Accum<T> exp_for(Accum<T> x) {
  if constexpr (sizeof(T) == 2) {
    return ex2_approx(x * kLog2E);
  } else {
    return exp(x);
  }
}

}  // namespace warpwright
