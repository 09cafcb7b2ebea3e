// Codes to the 16-bit operands of mma.m16n8k16, exactly. The scale multiplies the sums.
#pragma once

#include "device/lop3.cuh"
#include "device/types.cuh"

namespace warpwright {

// A 16-bit float whose mantissa holds a small integer u is kBase + u. Subtracting kBase + z leaves
// q - z without rounding. One fused multiply-add by the scale would round kBase times the scale.
template <class T>
struct IntegerBits;
template <>
struct IntegerBits<bf16> {  // 128 + u, u < 128
  static constexpr uint32_t kBase = 0x43004300;
  using Pair = __nv_bfloat162;
};
template <>
struct IntegerBits<half> {  // 1024 + u, u < 1024
  static constexpr uint32_t kBase = 0x64006400;
  using Pair = __half2;
};

template <class T>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  using Pair = typename IntegerBits<T>::Pair;
  const Pair difference = __hsub2(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

// Rounds: the scale of a group times q - z.
template <class T>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  using Pair = typename IntegerBits<T>::Pair;
  const Pair product = __hmul2(*reinterpret_cast<Pair*>(&a), *reinterpret_cast<Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// kBase + zero in both halves.
template <class T>
__device__ __forceinline__ uint32_t offset_pair(uint32_t zero) {
  return IntegerBits<T>::kBase | zero * 0x10001u;
}

// One half in both.
__device__ __forceinline__ uint32_t low_halves(uint32_t pair) {
  return __byte_perm(pair, 0, 0x1010);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t pair) {
  return __byte_perm(pair, 0, 0x3232);
}

// The lowest bytes in the halves.
__device__ __forceinline__ uint32_t two_bytes_to_halves(uint32_t bytes) {
  return __byte_perm(bytes, 0, 0x4140);
}

// Features g (a[0], a[2]) and g + 8 (a[1], a[3]) of one word.
template <class T>
__device__ __forceinline__ void int4_operand(uint32_t (&a)[4], uint32_t word, uint32_t offset,
                                             uint32_t offset_plus_8) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = subtract_pair<T>(and_or(word >> (4 * i), 0x000f000fu, IntegerBits<T>::kBase),
                            i % 2 == 0 ? offset : offset_plus_8);
  }
}

// Four k of one feature, stored as q + 128.
__device__ __forceinline__ void int8_pairs(uint32_t& first, uint32_t& second, uint32_t word, half) {
  first = subtract_pair<half>(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u);
  second = subtract_pair<half>(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u);
}
// bf16 has too few mantissa bits, so the difference is a float32. Its upper half is the bf16.
__device__ __forceinline__ void int8_pairs(uint32_t& first, uint32_t& second, uint32_t word, bf16) {
  auto value = [&](uint32_t selector) {  // 2^23 + u - (2^23 + 128)
    return __float_as_uint(__uint_as_float(__byte_perm(word, 0x4b000000u, selector)) - 8388736.0f);
  };
  first = __byte_perm(value(0x7440), value(0x7441), 0x7632);
  second = __byte_perm(value(0x7442), value(0x7443), 0x7632);
}

// The lower and the upper bytes of both halves, each two bytes stored as q + 128.
__device__ __forceinline__ void int8_halves(uint32_t& lower, uint32_t& upper, uint32_t word, half) {
  lower = subtract_pair<half>(__byte_perm(word, 0x64646464u, 0x4240), 0x64806480u);
  upper = subtract_pair<half>(__byte_perm(word, 0x64646464u, 0x4341), 0x64806480u);
}
__device__ __forceinline__ void int8_halves(uint32_t& lower, uint32_t& upper, uint32_t word, bf16) {
  int8_pairs(lower, upper, __byte_perm(word, 0, 0x3120), bf16());
}

template <class T>
__device__ __forceinline__ void int8_operand(uint32_t (&a)[4], uint32_t word,
                                             uint32_t word_plus_8) {
  int8_pairs(a[0], a[2], word, T());
  int8_pairs(a[1], a[3], word_plus_8, T());
}

}  // namespace warpwright
