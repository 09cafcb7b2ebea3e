// Instructions of the special-function unit (PTX ISA, "Floating Point Instructions"). Results below
// the smallest normal number become 0. NaN gives NaN.
#pragma once

namespace warpwright {

// "ex2": 2^x, relative error below 2^-22; 2^-inf = 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// "rcp": 1 / x to one ulp. 0 and subnormal numbers give infinity with their sign; infinity and
// |x| > 2^126 give 0.
__device__ __forceinline__ float rcp_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace warpwright
