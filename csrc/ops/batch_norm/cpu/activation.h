// The activation after batch norm, and its derivative, on a number or on lanes of one type. NaN and
// infinities as in native's CPU kernels: silu(-inf) is NaN, and so is hardswish's derivative at
// NaN.
#pragma once

#include <cmath>

#include "cpu/exp.h"
#include "cpu/lanes.h"
#include "ops/batch_norm/batch_norm.h"

namespace warpwright {

inline float exp_of_lanes(float x) { return std::exp(x); }
inline double exp_of_lanes(double x) { return std::exp(x); }
inline Values<float> exp_of_lanes(Values<float> x) { return exp_lanes(x); }
inline Values<double> exp_of_lanes(Values<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class V>
V activated(NormActivation activation, V y) {
  const V zero{};
  switch (activation) {
    case NormActivation::kNone:
      return y;
    case NormActivation::kRelu:
      return y < zero ? zero : y;  // NaN and -0 stay
    case NormActivation::kSilu:
      return y / (exp_of_lanes(V(-y)) + 1.f);
    case NormActivation::kHardswish: {
      const V six = zero + 6.f;
      V clamped = y + 3.f;
      clamped = clamped < zero ? zero : clamped;
      clamped = clamped > six ? six : clamped;
      return y * clamped / 6.f;
    }
  }
  return y;
}

// dy times the derivative at z: of a relu, its stored output.
template <class V>
V gated(NormActivation activation, V dy, V z) {
  const V zero{};
  switch (activation) {
    case NormActivation::kNone:
      return dy;
    case NormActivation::kRelu:
      return z <= zero ? zero : dy;
    case NormActivation::kSilu: {
      const V one = zero + 1.f;
      const V e = exp_of_lanes(V(-z)), s = one / (e + one);
      const V rest = e <= one ? V(e * s) : V(one - s);  // 1 - s, without cancellation
      return dy * (s * (z * rest + one));
    }
    case NormActivation::kHardswish: {
      const V three = zero + 3.f;
      const V inside = dy * (z / three + 0.5f);
      const V above = z >= three ? dy : inside;
      return z <= -three ? zero : above;
    }
  }
  return dy;
}

}  // namespace warpwright
