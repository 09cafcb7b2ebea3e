// log(sum of exp) as a reference and a sum of exp(x - reference), in one pass.
#pragma once

#include <limits>

#include "device/exp.cuh"
#include "device/types.cuh"

namespace warpwright {

// The reference is a maximum, but always finite: then no difference of infinities arises. Elements
// of infinity make the sum infinite, and NaN makes it NaN.
template <class Compute>
struct ScaledSum {
  Compute reference, sum;
};

template <class Compute>
constexpr Compute kLargest = std::numeric_limits<Compute>::max();

// exp of a difference from the reference, which is not above 0 or infinite. An error of 2^-22 in a
// small term does not show in the sum.
__device__ __forceinline__ float exp_of_difference(float x) { return ex2_approx(x * kLog2E); }
__device__ __forceinline__ double exp_of_difference(double x) { return exp(x); }

// The larger number; the other one for NaN.
__device__ __forceinline__ float larger_number(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger_number(double a, double b) { return fmax(a, b); }

template <class Compute>
__device__ __forceinline__ ScaledSum<Compute> no_sum() {
  return {-kLargest<Compute>, 0};
}

// exp(x) alone.
template <class Compute>
__device__ __forceinline__ ScaledSum<Compute> scaled(Compute x) {
  Compute reference = larger_number(x, -kLargest<Compute>);
  reference = reference > kLargest<Compute> ? kLargest<Compute> : reference;
  // A finite x is its own reference. Infinities leave infinity or 0, and NaN leaves NaN.
  const Compute sum = x > reference ? x : (x < reference ? Compute{0} : Compute{1});
  return {reference, x == x ? sum : x};
}

// One exp: the sum with the larger reference keeps it.
template <class Compute>
__device__ __forceinline__ ScaledSum<Compute> joined(ScaledSum<Compute> a, ScaledSum<Compute> b) {
  const Compute distance = b.reference - a.reference;
  const Compute factor = exp_of_difference(distance > 0 ? -distance : distance);
  if (distance > 0) return {b.reference, a.sum * factor + b.sum};
  return {a.reference, a.sum + b.sum * factor};
}

template <class Compute>
__device__ __forceinline__ Compute log_of(ScaledSum<Compute> x) {
  return x.reference + log(x.sum);
}

}  // namespace warpwright
