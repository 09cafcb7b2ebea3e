// Discrete Fourier transforms of a few points in one thread's registers. Factors are constants
// computed in double at compile time.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace warpwright::fft {

// Calls f<0>() to f<kCount - 1>().
template <int kCount, class F>
__device__ __forceinline__ void unrolled(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Taylor series; x is at most pi in size.
constexpr double sine(double x) {
  double term = x, sum = x;
  for (int i = 1; i < 16; ++i) {
    term *= -x * x / (2 * i * (2 * i + 1));
    sum += term;
  }
  return sum;
}

constexpr double kPi = 3.14159265358979323846;

// exp(-2 pi i j / n).
constexpr double root_re(int j, int n) {
  const int twice = (4 * j + n) % (4 * n);  // cos(a) = sin(a + pi / 2), in quarters of a step
  return sine(kPi * (twice > 2 * n ? twice - 4 * n : twice) / (2.0 * n));
}
constexpr double root_im(int j, int n) {
  const int turned = j % n;
  return -sine(2 * kPi * (2 * turned > n ? turned - n : turned) / n);
}

__device__ __forceinline__ float2 operator+(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 operator-(float2 a, float2 b) {
  return make_float2(a.x - b.x, a.y - b.y);
}
__device__ __forceinline__ float2 multiply(float2 a, float2 b) {
  return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}
// a * conj(b).
__device__ __forceinline__ float2 multiply_conj(float2 a, float2 b) {
  return make_float2(a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y);
}

// v * exp(-2 pi i kJ / kN).
template <int kJ, int kN>
__device__ __forceinline__ float2 times_root(float2 v) {
  if constexpr (kJ % kN == 0) {
    return v;
  } else if constexpr (4 * kJ % kN == 0) {
    constexpr int kQuarter = 4 * kJ / kN % 4;
    if constexpr (kQuarter == 1) return make_float2(v.y, -v.x);
    if constexpr (kQuarter == 2) return make_float2(-v.x, -v.y);
    return make_float2(-v.y, v.x);
  } else {
    constexpr float kRe = static_cast<float>(root_re(kJ, kN));
    constexpr float kIm = static_cast<float>(root_im(kJ, kN));
    return multiply(v, make_float2(kRe, kIm));
  }
}

constexpr int first_factor(int points) {
  return points == 16 || points == 8 ? 4 : points == 6 ? 2 : points;
}

template <int kPoints>
__device__ __forceinline__ void dft(float2 (&v)[kPoints]);

// Odd: each pair of inputs j and kPoints - j enters by its sum and its difference.
template <int kPoints>
__device__ __forceinline__ void dft_odd(float2 (&v)[kPoints]) {
  constexpr int kHalf = kPoints / 2;
  float2 sum[kHalf], difference[kHalf];
  float2 all = v[0];
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    sum[j] = v[j + 1] + v[kPoints - 1 - j];
    difference[j] = v[j + 1] - v[kPoints - 1 - j];
    all = all + sum[j];
  }
  const float2 first = v[0];
  v[0] = all;
  unrolled<kHalf>([&]<int k>() {
    float2 even = first, odd = make_float2(0.0f, 0.0f);
    unrolled<kHalf>([&]<int j>() {
      constexpr float kRe = static_cast<float>(root_re((j + 1) * (k + 1), kPoints));
      constexpr float kIm = static_cast<float>(root_im((j + 1) * (k + 1), kPoints));
      even = make_float2(even.x + kRe * sum[j].x, even.y + kRe * sum[j].y);
      odd = make_float2(odd.x - kIm * difference[j].y, odd.y + kIm * difference[j].x);
    });
    v[k + 1] = even + odd;
    v[kPoints - 1 - k] = even - odd;
  });
}

// kPoints = kA kB: kB transforms of kA points, factors, kA transforms of kB points.
template <int kPoints>
__device__ __forceinline__ void dft_product(float2 (&v)[kPoints]) {
  constexpr int kA = first_factor(kPoints), kB = kPoints / kA;
  unrolled<kB>([&]<int b>() {
    float2 part[kA];
#pragma unroll
    for (int a = 0; a < kA; ++a) part[a] = v[kB * a + b];
    dft<kA>(part);
    unrolled<kA>([&]<int a>() { v[kB * a + b] = times_root<a * b, kPoints>(part[a]); });
  });
  float2 result[kPoints];
#pragma unroll
  for (int a = 0; a < kA; ++a) {
    float2 part[kB];
#pragma unroll
    for (int b = 0; b < kB; ++b) part[b] = v[kB * a + b];
    dft<kB>(part);
#pragma unroll
    for (int b = 0; b < kB; ++b) result[a + kA * b] = part[b];
  }
#pragma unroll
  for (int i = 0; i < kPoints; ++i) v[i] = result[i];
}

// v[k] = sum over j of v[j] exp(-2 pi i j k / kPoints).
template <int kPoints>
__device__ __forceinline__ void dft(float2 (&v)[kPoints]) {
  if constexpr (kPoints == 2) {
    const float2 a = v[0], b = v[1];
    v[0] = a + b;
    v[1] = a - b;
  } else if constexpr (kPoints == 4) {
    const float2 a = v[0] + v[2], b = v[0] - v[2], c = v[1] + v[3], d = v[1] - v[3];
    v[0] = a + c;
    v[1] = make_float2(b.x + d.y, b.y - d.x);
    v[2] = a - c;
    v[3] = make_float2(b.x - d.y, b.y + d.x);
  } else if constexpr (kPoints % 2 == 1) {
    dft_odd<kPoints>(v);
  } else {
    dft_product<kPoints>(v);
  }
}

// The same with the other sign: a transform of numbers whose parts are exchanged.
template <int kPoints>
__device__ __forceinline__ void inverse_dft(float2 (&v)[kPoints]) {
#pragma unroll
  for (int i = 0; i < kPoints; ++i) v[i] = make_float2(v[i].y, v[i].x);
  dft<kPoints>(v);
#pragma unroll
  for (int i = 0; i < kPoints; ++i) v[i] = make_float2(v[i].y, v[i].x);
}

// ---- factors between the stages ----

// exp(-2 pi i j / points) from a table in memory, whose entries are rounded from double.
struct TableRoots {
  const float2* table;
  __device__ __forceinline__ float2 operator()(int j) const { return __ldg(table + j); }
};

__device__ __forceinline__ float2 exact_root(int j, int points) {
  double sin, cos;
  sincospi(2.0 * j / points, &sin, &cos);
  return make_float2(static_cast<float>(cos), static_cast<float>(-sin));
}

// The same, computed. For kernels that run before the table is written.
template <int kPoints>
struct ComputedRoots {
  __device__ __forceinline__ float2 operator()(int j) const { return exact_root(j, kPoints); }
};

// v[k] *= root(j k), or its conjugate. The powers 1, 2, 4 and 8 of the root are read, the others
// are products of at most four of them.
template <bool kConj, int kRadix, class Roots>
__device__ __forceinline__ void twiddle(float2 (&v)[kRadix], const Roots& root, int j) {
  float2 power[kRadix];
  unrolled<kRadix - 1>([&]<int i>() {
    constexpr int k = i + 1;
    constexpr int kHigh = k >= 8 ? 8 : k >= 4 ? 4 : k >= 2 ? 2 : 1;
    if constexpr (k == kHigh) {
      power[k] = root(j * k);
    } else {
      power[k] = multiply(power[kHigh], power[k - kHigh]);
    }
    v[k] = kConj ? multiply_conj(v[k], power[k]) : multiply(v[k], power[k]);
  });
}

}  // namespace warpwright::fft
