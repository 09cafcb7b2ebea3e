// Numbers as codes of 8 bits and a scale.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fp8.cuh"
#include "device/vec.cuh"

namespace warpwright {

// The larger magnitude; NaN if either is.
__device__ __forceinline__ float larger_magnitude(float largest, float x) {
#ifdef __CUDA_ARCH__
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(x)));
#endif
  return largest;
}

// The codes of four numbers that are divided by a scale already: rounded to nearest even. None is
// beyond the largest code by more than its own rounding.
template <class Code>
__device__ __forceinline__ uint32_t codes_of(const float (&x)[4]) {
  if constexpr (std::is_same_v<Code, int8_t>) {
    // 1.5 * 2^23 makes the last bit of a float one: the low byte is the integer.
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(__fadd_rn(x[i], 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040),
                       0x5410);
  } else {
    constexpr auto kFormat = std::is_same_v<Code, fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    const uint32_t low = __nv_cvt_float2_to_fp8x2({x[0], x[1]}, __NV_SATFINITE, kFormat);
    const uint32_t high = __nv_cvt_float2_to_fp8x2({x[2], x[3]}, __NV_SATFINITE, kFormat);
    return low | high << 16;
  }
}

}  // namespace warpwright
