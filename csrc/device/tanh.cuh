// tanh on the special-function unit, and the logarithm that finds it again in a probability.
#pragma once

#include "device/special_function.cuh"

namespace warpwright {

// "lg2": log2(x), error below 2^-22, relative outside (0.5, 2); log2(0) = -inf.
__device__ __forceinline__ float lg2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh of x from 2 * log2(e) * x, absolute error below 2^-21.
__device__ __forceinline__ float tanh_from_log2(float y) {
  return fmaf(-2.f, rcp_approx(1.f + ex2_approx(y)), 1.f);
}

}  // namespace warpwright
