// What the kernels share that compute the mean and the sum of squared deviations of the columns of
// their output.
#pragma once

#include <cstdint>

#include "device/math.cuh"

namespace warpwright {

// The columns and the number of rows of a record; no rows: the record is unused.
struct MomentsRecord {
  int first_column, rows;
};

// Mean and squared deviations of `count` values.
struct CountedMoments {
  double mean;
  float deviation, count;

  // Chan, Golub & LeVeque 1979, eq. 2.1. In double: a mean far from zero keeps its last bits.
  __device__ __forceinline__ void merge(const CountedMoments& other) {
    if (other.count == 0) return;
    const double total = static_cast<double>(count) + other.count;
    const double distance = other.mean - mean, share = other.count / total;
    mean += distance * share;
    deviation += other.deviation + static_cast<float>(distance * count * share * distance);
    count += other.count;
  }
};

// One column's sums about a first value, which is as safe as Welford's update and needs no
// division.
struct ShiftedSums {
  float shift = 0, sum = 0, square = 0;

  __device__ __forceinline__ void add(float value) {
    const float distance = value - shift;
    sum += distance;
    square = fmaf(distance, distance, square);
  }
  // Sums of at most 16 values about the same shift. Added one by one to a long sum, small squares
  // would round away, always downwards.
  __device__ __forceinline__ void add(const ShiftedSums& few) {
    sum += few.sum;
    square += few.square;
  }
  __device__ __forceinline__ CountedMoments finish(int count) const {
    if (count == 0) return {0, 0, 0};
    const float mean = sum / static_cast<float>(count);
    return {static_cast<double>(shift) + mean, fmaxf(square - sum * mean, 0.0f),
            static_cast<float>(count)};
  }
};

}  // namespace warpwright
