// The exponential function, as precise as the caller's result type needs.
#pragma once

#include "device/special_function.cuh"
#include "device/types.cuh"

namespace warpwright {

constexpr float kLog2E = 1.44269504088896340736f;

// exp of an accumulator, as exact as a result of type T can show. Rounding to 16 bits hides an
// error of 2^-22; a float result does not. NaN gives NaN, -inf gives 0.
template <class T>
__device__ __forceinline__ Accum<T> exp_for(Accum<T> x) {
  if constexpr (sizeof(T) == 2) {
    return ex2_approx(x * kLog2E);
  } else {
    return exp(x);
  }
}

}  // namespace warpwright
