// The exponential as the special function unit computes it.
#pragma once

namespace warpwright {

// "Floating Point Instructions: ex2": 2^x, relative error 2^-22; 2^-inf = 0, NaN stays.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace warpwright
