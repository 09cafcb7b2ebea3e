// Registers of AVX-512. Each has the lanes of two registers of cpu/lanes.h, in their order, so that
// sums add the same elements in the same order with both.
#pragma once

#include "cpu/lanes.h"

#ifdef CPU_CAPABILITY_AVX512
namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

template <class T>
struct WideLanesOf {
  using Values __attribute__((vector_size(64))) = typename LanesOf<T>::Compute;
};
template <class T>
using WideValues = typename WideLanesOf<T>::Values;

template <class T, class Integer>
using RawWideLanes __attribute__((vector_size(2 * sizeof(Integer) * kLanes<T>))) = Integer;

// As load_lanes.
template <class T>
inline WideValues<T> load_wide_lanes(const T* source) {
  if constexpr (std::is_same_v<T, CpuCompute<T>>) {
    WideValues<T> result;
    std::memcpy(&result, source, sizeof(result));
    return result;
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return (WideValues<T>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
  } else {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return (WideValues<T>)_mm512_cvtph_ps(raw);
  }
}

// As store_lanes.
template <class T>
inline void store_wide_lanes(T* target, WideValues<T> values) {
  if constexpr (std::is_same_v<T, CpuCompute<T>>) {
    std::memcpy(target, &values, sizeof(values));
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    using Bits = RawWideLanes<T, uint32_t>;
    const Bits bits = (Bits)values;
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32((__m512i)rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(kept));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                        _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
  }
}

template <class T>
inline Values<T> low_half(WideValues<T> x) {
  return (Values<T>)_mm512_castpd512_pd256((__m512d)x);
}
template <class T>
inline Values<T> high_half(WideValues<T> x) {
  return (Values<T>)_mm512_extractf64x4_pd((__m512d)x, 1);
}
template <class T>
inline WideValues<T> with_low_half(WideValues<T> x, Values<T> low) {
  return (WideValues<T>)_mm512_insertf64x4((__m512d)x, (__m256d)low, 0);
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
#endif
