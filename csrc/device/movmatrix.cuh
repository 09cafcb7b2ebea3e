// "Warp-level matrix transpose instruction: movmatrix" (sm_75 and later).
#pragma once

#include <cstdint>

namespace warpwright {

// The transpose of an 8x8 matrix of 16-bit elements. Lane (g, t) = (lane / 4, lane % 4) has row g,
// columns 2t and 2t + 1, before and after. All lanes of the warp call it together.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(d) : "r"(pair));
  return d;
}

}  // namespace warpwright
