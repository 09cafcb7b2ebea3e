// exp by the special function unit: 2^x with the base's logarithm multiplied in.
#pragma once

namespace warpwright {

constexpr float kLog2E = 1.44269504088896340736f;

// PTX ISA "ex2": relative error below 2^-22; results below the smallest normal number become 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp(x), for float fast. NaN stays NaN, -inf gives 0.
__device__ __forceinline__ float fast_exp(float x) { return ex2_approx(x * kLog2E); }
__device__ __forceinline__ double fast_exp(double x) { return exp(x); }

}  // namespace warpwright
