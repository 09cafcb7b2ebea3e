// Phi(z), the standard normal distribution, to the digits that a result's rounding leaves. CUDA's
// erff and erfcf branch per element; these have no branch. The coefficients are minimax fits of
// ours, in float64.
#pragma once

#include "device/special_function.cuh"
#include "device/types.cuh"

namespace warpwright {

// The error that the result's rounding hides: none, 2^-21 (TF32 operands), 2^-13 of the tails of
// Phi (16-bit results).
enum class Rounding { kFull, kTf32, k16Bits };

template <class T>
constexpr Rounding kRoundingOf = sizeof(T) == 2 ? Rounding::k16Bits : Rounding::kFull;

// c[0] + x (c[1] + x (c[2] + ...)).
template <int kTerms>
__device__ __forceinline__ float polynomial(float x, const float (&c)[kTerms]) {
  float result = c[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) result = fmaf(result, x, c[i]);
  return result;
}

// Phi(z) of a float, within 2^-24 near 0 and 2^-23 of itself above. The left tail keeps its
// digits, within 2^-21 of itself; (1 + erf) / 2 has none left at z = -5.5. With a = |z|:
//   a < 1.25   1/2 + z S(z^2)
//   else       Phi(-a) = exp(-a^2 / 2) u U(u), u = 1 / (a + 3). In 2^(hi + lo), lo keeps what
//              the product for hi rounds off: up to 2^-17 of the result otherwise.
__device__ __forceinline__ float normal_cdf_full(float z) {
  constexpr float kCenter[] = {0.398942292f,    -0.0664903745f,   0.00997350365f, -0.00118711882f,
                               0.000115043367f, -9.06477635e-06f, 4.77419178e-07f};
  constexpr float kTail[] = {0.398923844f, 1.19826865f, 3.14365864f,  8.06261444f,
                             2.15522838f,  74.0456009f, -300.559418f, 295.159363f};
  constexpr double kHalfLog2E = 0.72134752044448170368;
  constexpr float kScale = -static_cast<float>(kHalfLog2E);
  constexpr float kScaleLow = -static_cast<float>(kHalfLog2E + static_cast<double>(kScale));
  constexpr float kLn2 = 0.69314718f;

  const float center = fmaf(z, polynomial(z * z, kCenter), 0.5f);
  const float a = fminf(fabsf(z), 15.0f);  // 2^hi is 0 there already; infinity would give NaN
  const float square = a * a;
  const float hi = square * kScale;
  float lo = fmaf(square, kScale, -hi);
  lo = fmaf(fmaf(a, a, -square), kScale, lo);
  lo = fmaf(square, kScaleLow, lo);
  const float u = rcp_approx(a + 3.0f);
  const float tail = ex2_approx(hi) * fmaf(lo, kLn2, 1.0f) * (u * polynomial(u, kTail));
  return a < 1.25f ? center : z < 0.0f ? tail : 1.0f - tail;  // of NaN: 1
}

// log2 Phi(-a) is a smooth, falling function of a >= 0; so is the polynomial.
template <int kTerms>
__device__ __forceinline__ float normal_cdf_of_log2(float z, const float (&log2_tail)[kTerms]) {
  const float tail = ex2_approx(polynomial(fabsf(z), log2_tail));
  return z < 0.0f ? tail : 1.0f - tail;  // NaN is not below 0 and stays
}

// TF32: Phi is within 2^-23, z Phi(z) within 2^-24. 16 bits: Phi(-a) is within 2^-13 of itself, or
// a Phi(-a) within 2^-29. NaN may give 1: a caller's product with z is NaN.
template <Rounding kRounding, class Acc>
__device__ __forceinline__ Acc normal_cdf(Acc z) {
  if constexpr (sizeof(Acc) == sizeof(double)) {
    constexpr Acc kRootHalf = Acc(0.70710678118654752440);
    return Acc(0.5) * erfc(-z * kRootHalf);
  } else if constexpr (kRounding == Rounding::kFull) {
    return normal_cdf_full(z);
  } else if constexpr (kRounding == Rounding::kTf32) {
    constexpr float kLog2[] = {-1.0f,          -1.1511114f,   -4.591556e-1f,
                               -5.2652903e-2f, 7.285519e-3f,  -3.0393573e-4f,
                               -1.1813514e-4f, 2.5257568e-5f, -1.6708927e-6f};
    return normal_cdf_of_log2(z, kLog2);
  } else {
    constexpr float kLog2[] = {-1.0001633f,    -1.1486071f,   -4.6530407e-1f,
                               -4.7394444e-2f, 5.5864151e-3f, -2.9674276e-4f};
    return normal_cdf_of_log2(z, kLog2);
  }
}

}  // namespace warpwright
