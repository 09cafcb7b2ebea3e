// A few adjacent elements in the compiler's vector extension (GCC, Clang): comparisons give lane
// masks, and `mask ? a : b` selects. 16-bit floats compute in float, small integers in int32.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "cpu/types.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

template <class T>
struct LanesOf {
  using Compute =
      std::conditional_t<std::is_integral_v<T>,
                         std::conditional_t<sizeof(T) <= 4, int32_t, int64_t>, CpuCompute<T>>;
  static constexpr int kCount = 32 / static_cast<int>(sizeof(Compute));  // one AVX2 register
  using Values __attribute__((vector_size(32))) = Compute;
  using Mask __attribute__((vector_size(32))) =
      std::conditional_t<sizeof(Compute) == 4, int32_t, int64_t>;
};
template <class T>
using Values = typename LanesOf<T>::Values;
template <class T>
using Mask = typename LanesOf<T>::Mask;
template <class T>
constexpr int kLanes = LanesOf<T>::kCount;

template <class T, class Integer>
using RawLanes __attribute__((vector_size(sizeof(Integer) * kLanes<T>))) = Integer;

// `code` in every lane.
template <class T>
inline Mask<T> code_lanes(int64_t code) {
  return Mask<T>{} + static_cast<std::conditional_t<kLanes<T> == 8, int32_t, int64_t>>(code);
}

// kLanes<T> neighbours from `source`, converted to the compute type.
template <class T>
inline Values<T> load_lanes(const T* source) {
  if constexpr (std::is_same_v<T, typename LanesOf<T>::Compute>) {
    Values<T> result;
    std::memcpy(&result, source, sizeof(result));
    return result;
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    RawLanes<T, uint16_t> raw;
    std::memcpy(&raw, source, sizeof(raw));
    return (Values<T>)(__builtin_convertvector(raw, RawLanes<T, uint32_t>) << 16);
  } else if constexpr (std::is_integral_v<T>) {
    RawLanes<T, T> raw;
    std::memcpy(&raw, source, sizeof(raw));
    return __builtin_convertvector(raw, Values<T>);
  } else {
#ifdef __F16C__
    return (Values<T>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
    Values<T> result;
    for (int i = 0; i < kLanes<T>; ++i) result[i] = source[i];
    return result;
#endif
  }
}

template <class T>
inline void store_lanes(T* target, Values<T> values) {
  if constexpr (std::is_same_v<T, typename LanesOf<T>::Compute>) {
    std::memcpy(target, &values, sizeof(values));
  } else if constexpr (std::is_integral_v<T>) {
    const auto raw = __builtin_convertvector(values, RawLanes<T, T>);
    std::memcpy(target, &raw, sizeof(raw));
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    // Rounds to nearest even. NaN would carry into infinity, so it becomes the quiet NaN.
    using Bits __attribute__((vector_size(32))) = uint32_t;
    const Bits bits = (Bits)values;
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Bits kept = (values != values) ? Bits{} + 0x7fc0 : rounded;
    const auto raw = __builtin_convertvector(kept, RawLanes<T, uint16_t>);
    std::memcpy(target, &raw, sizeof(raw));
  } else {
#ifdef __F16C__
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                     _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes<T>; ++i) target[i] = static_cast<T>(values[i]);
#endif
  }
}

// The same for codes, in lanes that match those of T. Bytes by hand, because GCC 12 converts them
// one at a time.
template <class T, class Code>
inline Mask<T> load_code_lanes(const Code* source) {
#ifdef __AVX2__
  if constexpr (sizeof(Code) == 1) {
    constexpr bool kSigned = std::is_signed_v<Code>;
    if constexpr (kLanes<T> == 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
      return (Mask<T>)(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    } else {
      const __m128i bytes = _mm_loadu_si32(source);
      return (Mask<T>)(kSigned ? _mm256_cvtepi8_epi64(bytes) : _mm256_cvtepu8_epi64(bytes));
    }
  }
#endif
  RawLanes<T, Code> raw;
  std::memcpy(&raw, source, sizeof(raw));
  return __builtin_convertvector(raw, Mask<T>);
}
template <class T, class Code>
inline void store_code_lanes(Code* target, Mask<T> codes) {
  RawLanes<T, Code> raw;
  if constexpr (std::is_same_v<Code, uint8_t>) {
    using Bytes __attribute__((vector_size(32))) = uint8_t;
    const Bytes bytes = (Bytes)codes;  // little endian: the low byte comes first
    if constexpr (kLanes<T> == 8) {
      raw = __builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 16, 20, 24, 28);
    } else {
      raw = __builtin_shufflevector(bytes, bytes, 0, 8, 16, 24);
    }
  } else {
    raw = __builtin_convertvector(codes, RawLanes<T, Code>);
  }
  std::memcpy(target, &raw, sizeof(raw));
}

// Every second of 2 * kLanes<T> neighbours, beginning with the first or the second.
template <class T>
struct EvenOdd {
  Values<T> even, odd;
};
template <class T>
inline EvenOdd<T> load_even_odd(const T* source) {
  const Values<T> a = load_lanes(source), b = load_lanes(source + kLanes<T>);
  if constexpr (kLanes<T> == 8) {
    return {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
            __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)};
  } else {
    return {__builtin_shufflevector(a, b, 0, 2, 4, 6), __builtin_shufflevector(a, b, 1, 3, 5, 7)};
  }
}
template <class T>
inline void store_even_odd(T* target, Values<T> even, Values<T> odd) {
  if constexpr (kLanes<T> == 8) {
    store_lanes(target, Values<T>(__builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11)));
    store_lanes(target + kLanes<T>,
                Values<T>(__builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15)));
  } else {
    store_lanes(target, Values<T>(__builtin_shufflevector(even, odd, 0, 4, 1, 5)));
    store_lanes(target + kLanes<T>, Values<T>(__builtin_shufflevector(even, odd, 2, 6, 3, 7)));
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
