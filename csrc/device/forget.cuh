// Hides what the registers of an array hold, so that the compiler converts them again instead of
// keeping the wider values.
#pragma once

#include "device/math.cuh"

namespace warpwright {

template <class Array>
__device__ __forceinline__ void forget(Array& array) {
  if constexpr (sizeof(array) % 4 == 0) {
    int* words = reinterpret_cast<int*>(&array);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(array) / 4); ++i) {
      words[i] = derive_anew(words[i]);
    }
  }
}

}  // namespace warpwright
