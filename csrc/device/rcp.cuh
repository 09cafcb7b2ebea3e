// The reciprocal as the special function unit computes it.
#pragma once

namespace warpwright {

// "Floating Point Instructions: rcp": 1 / x to one ulp; 0 and what is below the smallest normal
// number give infinity of that sign, infinity and |x| > 2^126 give 0, NaN stays.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace warpwright
