// exp in float with fewer instructions than at::vec's. At most 1.01 ulp off over all floats; 0,
// infinity and NaN as std::exp.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

// The widest register of floats: Values<float> of cpu/lanes.h, or twice as many for AVX-512.
#ifdef CPU_CAPABILITY_AVX512
constexpr int kFloatLanesBytes = 64;
#else
constexpr int kFloatLanesBytes = 32;
#endif
using FloatLanes __attribute__((vector_size(kFloatLanesBytes))) = float;

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, and exp(r) = 1 + r + r^2 q(r). q is the polynomial of
// degree 4 with the least largest relative error of exp(r), 3.1e-9 (Remez' algorithm).
// Of |x| <= 120, or NaN. V: a register of floats of any width.
template <class V>
__attribute__((always_inline)) inline V bounded_exp_lanes(V x) {
  using Bits = decltype(x < x);
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  constexpr float kRound = 12582912.f, kLog2E = 1.44269504f;
  const V shifted = x * kLog2E + kRound;
  const V n = shifted - kRound;
  // ln(2) in two parts: n times the first is exact.
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  const V q =
      (((r * 1.38145402e-3f + 8.36874511e-3f) * r + 4.16683908e-2f) * r + 1.66665204e-1f) * r +
      4.99999934e-1f;
  const V p = (r * r) * q + r + 1.f;
  // 2^n in two factors, each a normal number.
  Bits whole, magic;
  std::memcpy(&whole, &shifted, sizeof(whole));
  const V rounds = V{} + kRound;
  std::memcpy(&magic, &rounds, sizeof(magic));
  whole -= magic;
  const Bits half = whole >> 1;
  const Bits low = (half + 127) << 23, high = (whole - half + 127) << 23;
  V scale_low, scale_high;
  std::memcpy(&scale_low, &low, sizeof(low));
  std::memcpy(&scale_high, &high, sizeof(high));
  return p * scale_low * scale_high;
}

// x, not below `low` nor above `high`; NaN stays. The instructions return their second operand if
// one is NaN. A comparison and a blend would take a third of exp's time.
template <class V>
__attribute__((always_inline)) inline V clamped_lanes(V x, float low, float high) {
  const V least = V{} + low, most = V{} + high;
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (sizeof(V) == sizeof(__m512)) {
    return (V)_mm512_min_ps((__m512)most, _mm512_max_ps((__m512)least, (__m512)x));
  }
#endif
#ifdef __AVX2__
  if constexpr (sizeof(V) == sizeof(__m256)) {
    return (V)_mm256_min_ps((__m256)most, _mm256_max_ps((__m256)least, (__m256)x));
  }
#endif
  x = x < least ? least : x;
  return x > most ? most : x;
}

template <class V>
__attribute__((always_inline)) inline V exp_lanes(V x) {
  return bounded_exp_lanes(clamped_lanes(x, -104, 89));  // exp is 0 and infinity there
}

// The same for ATen's vectors, whose own exp serves the other types.
template <bool kBounded = false, class C>
__attribute__((always_inline)) inline at::vec::Vectorized<C> exp_of(
    const at::vec::Vectorized<C>& x) {
  if constexpr (std::is_same_v<C, float> && sizeof(x) == kFloatLanesBytes) {
    FloatLanes lanes;
    x.store(&lanes);
    lanes = kBounded ? bounded_exp_lanes(lanes) : exp_lanes(lanes);
    return at::vec::Vectorized<C>::loadu(&lanes);
  } else {
    return x.exp();
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
