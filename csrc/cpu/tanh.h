// tanh in float. AVX-512 looks the coefficients of a polynomial up, because two registers hold 32
// numbers; other code computes an exponential and divides.
#pragma once

#include "cpu/activation.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

#ifdef CPU_CAPABILITY_AVX512

// tanh(a), a >= 0, in 32 intervals: four per power of two from 2^-4 on, the first one from 0 on.
// Rows: the center c of each interval, then the coefficients of t^0 ... t^5, t = a - c. They are
// least-squares fits of the relative error at Chebyshev nodes, at most 2.9e-8 off. A center is the
// float near the middle whose tanh is nearest to a float, so the constant's rounding hardly counts.
// From 10 on tanh is 1.
constexpr int kTanhFirstInterval = 0x3d800000 >> 21;  // of 2^-4: exponent and two bits of mantissa
alignas(64) constexpr float kTanhTable[7 * 32] = {
    // centers
    0, 0.0859364495f, 0.101560496f, 0.117190413f, 0.140629709f, 0.17187272f, 0.20312424f,
    0.23437345f, 0.281243235f, 0.34375155f, 0.406240493f, 0.468753487f, 0.562476516f, 0.687487423f,
    0.812479019f, 0.937519848f, 1.12498033f, 1.37504101f, 1.62498569f, 1.87500703f, 2.24994326f,
    2.75006676f, 3.24991369f, 3.75008559f, 4.49993181f, 5.50019073f, 6.49980927f, 7.50019073f,
    8.99961853f, 10, 12, 14,
    // t^0
    0, 0.0857255235f, 0.101212747f, 0.116656862f, 0.13970992f, 0.170200095f, 0.200375989f,
    0.230174243f, 0.274055332f, 0.330822498f, 0.385275871f, 0.437191606f, 0.509812593f,
    0.596365452f, 0.670955539f, 0.734080672f, 0.809294283f, 0.879835963f, 0.925344169f,
    0.954045892f, 0.978023648f, 0.991860807f, 0.996997118f, 0.998894632f, 0.999753177f,
    0.999966621f, 0.99999547f, 0.999999404f, 0.99999994f, 1, 1, 1,
    // t^1
    1, 0.992651105f, 0.989755988f, 0.986391187f, 0.980481148f, 0.971031904f, 0.959849477f,
    0.947019815f, 0.924893677f, 0.890556455f, 0.8515625f, 0.808863521f, 0.740091145f, 0.644348264f,
    0.549818695f, 0.461125553f, 0.345042765f, 0.225888669f, 0.143738165f, 0.0897964388f,
    0.0434697419f, 0.016212143f, 0.00599674834f, 0.00220951531f, 0.000493595435f, 6.67806817e-05f,
    9.04495573e-06f, 1.22324116e-06f, 6.11256894e-08f, 0, 0, 0,
    // t^2
    0, -0.0850954056f, -0.100175872f, -0.115069002f, -0.136982977f, -0.165269852f, -0.192330867f,
    -0.217980117f, -0.253472f, -0.294616073f, -0.328086525f, -0.353628397f, -0.377307504f,
    -0.384266913f, -0.368903965f, -0.33850342f, -0.279243082f, -0.19874616f, -0.13300772f,
    -0.0856699944f, -0.0425132029f, -0.0160792544f, -0.00597832538f, -0.00220690924f,
    -0.000492851424f, -6.68776411e-05f, -8.91212494e-06f, -1.47000935e-06f, 5.68386547e-08f, 0, 0,
    0,
    // t^3
    -0.333332449f, -0.322034061f, -0.320217103f, -0.315907359f, -0.307812482f, -0.295240045f,
    -0.281592309f, -0.265471727f, -0.23883976f, -0.199319705f, -0.15743874f, -0.115085363f,
    -0.0543619953f, 0.014367626f, 0.0642209128f, 0.094791621f, 0.11097417f, 0.0995692089f,
    0.0751658231f, 0.0518005565f, 0.0270904899f, 0.0105448617f, 0.00396166462f, 0.00146802783f,
    0.000328469527f, 4.44653633e-05f, 6.02270939e-06f, 8.13020335e-07f, 3.95522477e-08f, 0, 0, 0,
    // t^4
    0, 0.0543794632f, 0.0651120394f, 0.0712498128f, 0.0887497663f, 0.10580156f, 0.120741591f,
    0.135537684f, 0.149836034f, 0.164055035f, 0.169988841f, 0.168160453f, 0.153264359f,
    0.119439319f, 0.079909794f, 0.0433386192f, 0.00367319374f, -0.0211139396f, -0.0251273531f,
    -0.0208494943f, -0.0123869507f, -0.00514708133f, -0.0019782912f, -0.000739148469f,
    -0.000172015672f, -2.27243199e-05f, -3.54641452e-06f, 3.67740569e-07f, -1.17623671e-07f, 0, 0,
    0,
    // t^5
    0.132873461f, -18.0583611f, 5.23804092f, 6.35557938f, 0.472330064f, -0.798548281f, 0.620291412f,
    -0.00242306013f, 0.0643599853f, -0.0168806482f, -0.00254236115f, 0.0322520062f, -0.0396616459f,
    -0.059219338f, -0.0582677349f, -0.0551570989f, -0.0320322104f, -0.00958106201f, 0.00137491955f,
    0.00462788157f, 0.00397811411f, 0.00191514648f, 0.000770504877f, 0.000292730896f,
    6.83054968e-05f, 9.28499776e-06f, 1.25941017e-06f, 1.76145392e-07f, 9.93156846e-09f, 0, 0, 0};

// At most 1.01 ulp off over all floats.
__attribute__((always_inline)) inline Vector<float> tanh_of(Vector<float> x) {
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  // The second operand if one is NaN. Infinity minus a center would be infinity times 0.
  const __m512 a = _mm512_min_ps(_mm512_set1_ps(12), _mm512_xor_ps(x, sign));
  // A permutation reads the lowest five bits.
  const __m512i interval =
      _mm512_max_epi32(_mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 21),
                                        _mm512_set1_epi32(kTanhFirstInterval)),
                       _mm512_setzero_si512());
  const auto of_interval = [&](int row) __attribute__((always_inline)) {
    return _mm512_permutex2var_ps(_mm512_load_ps(kTanhTable + row * 32), interval,
                                  _mm512_load_ps(kTanhTable + row * 32 + 16));
  };
  const __m512 t = _mm512_sub_ps(a, of_interval(0));
  __m512 sum = of_interval(6);
  for (int row = 5; row > 0; --row) sum = _mm512_fmadd_ps(sum, t, of_interval(row));
  return _mm512_or_ps(sum, sign);
}

#else

// With a = |x|:
//   a < 0.625  a + a^3 Q(a^2); Q is the minimax fit of tanh's relative error, 4.4e-9
//   else       1 - 2 / (exp(2 a) + 1)
inline Vector<float> tanh_of(Vector<float> x) {
  using V = Vector<float>;
  constexpr float kQ[] = {-0.3333328f, 0.13331442f, -0.053739715f, 0.020639088f, -0.0057049873f};
  const V one(1), two(2), sign = x & V(-0.0f), a = x ^ sign, square = a * a;
  const V near = at::vec::fmadd(a * square, polynomial(square, kQ), a);
  const V far = one - two / (exp_of(a + a) + one);
  return V::blendv(far, near, a < V(0.625)) | sign;
}

#endif

inline Vector<double> tanh_of(Vector<double> x) { return x.tanh(); }

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
