// Shared by the kernels of group_norm: moments, and what a channel needs.
#pragma once

#include "device/access.cuh"
#include "device/math.cuh"
#include "ops/group_norm/group_norm.h"
#include "tile/rows/held.cuh"

namespace warpwright {

// Mean and squared deviations of a number of values. merge() is the formula of Chan et al. (1979).
template <class Acc>
struct Moments {
  Acc count = 0, mean = 0, squares = 0;

  __device__ __forceinline__ void merge(const Moments& b) {
    if (b.count == Acc(0)) return;
    const Acc total = count + b.count, distance = b.mean - mean, share = b.count / total;
    mean += distance * share;
    squares += b.squares + distance * distance * count * share;
    count = total;
  }
  __device__ __forceinline__ Moments from_lane(int offset) const {
    return {__shfl_xor_sync(kFullMask, count, offset), __shfl_xor_sync(kFullMask, mean, offset),
            __shfl_xor_sync(kFullMask, squares, offset)};
  }
};

// Of the first `count` values.
template <int kCount, class Acc>
__device__ __forceinline__ Moments<Acc> moments_of(const Acc (&values)[kCount], int count) {
  Moments<Acc> result;
  Acc sum = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) sum += j < count ? values[j] : Acc(0);
  result.count = static_cast<Acc>(count);
  result.mean = count > 0 ? sum / static_cast<Acc>(count) : Acc(0);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Acc d = j < count ? values[j] - result.mean : Acc(0);
    result.squares += d * d;
  }
  return result;
}

template <class Acc>
__device__ __forceinline__ Acc group_norm_rstd(Acc variance, Acc eps) {
  if constexpr (sizeof(Acc) == 8) {
    return rsqrt(variance + eps);
  } else {
    return rsqrtf(variance + eps);
  }
}

// A channel's factor or summand; `absent` if there is no vector.
template <class T>
__device__ __forceinline__ Accum<T> channel_value(const GroupNormVector& vector, int64_t channel,
                                                  Accum<T> absent) {
  if (vector.data == nullptr) return absent;
  return load_either<T, 1>(vector.data, vector.dtype == DType::kFloat32, channel)[0];
}

}  // namespace warpwright
