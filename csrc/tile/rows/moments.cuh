// Mean and squared deviations of a row in registers, exact in one read. Each warp takes deviations
// from its own mean, and the formula of Chan et al. (1979) merges the warps' results.
#pragma once

#include "tile/rows/held.cuh"

namespace warpwright {

template <class Acc>
struct RowMoments {
  Acc mean;
  Acc squares;  // sum of (x - mean)^2; not centered: of x^2
};

// The exchange among warps in row_moments().
template <bool kCentered, class Acc>
using MomentsMeeting = RowMeeting<Acc, kCentered ? 2 : 1>;

// The moments of the group's row. Every thread gets the same bits.
template <bool kCentered, class T, int kVec, int kHeld>
__device__ __forceinline__ RowMoments<Accum<T>> row_moments(
    const Vec<T, kVec> (&x)[kHeld], const HeldColumns<kVec>& columns, int cols,
    MomentsMeeting<kCentered, Accum<T>>& meeting) {
  using Acc = Accum<T>;
  const int width = columns.lanes < kWarpSize ? columns.lanes : kWarpSize;
  const int warp = columns.lane / kWarpSize;
  const bool shared = columns.lanes > kWarpSize;
  RowMoments<Acc> own{0, 0};
  int count = cols;
  if constexpr (kCentered) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Vec<Acc, kVec> values = widen(x[i]);
      sum += tree_sum<kVec>([&](int j) { return values[j]; });
    }
    if (shared) count = columns.template of_warp<kHeld>(warp);
    own.mean = count > 0 ? sum_of_lanes(sum, width) / static_cast<Acc>(count) : Acc(0);
  }
  Acc squares = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const Vec<Acc, kVec> values = widen(x[i]);
    const Acc part = tree_sum<kVec>([&](int j) {
      const Acc d = values[j] - own.mean;
      return d * d;
    });
    squares += columns.has(i) ? part : Acc(0);
  }
  own.squares = sum_of_lanes(squares, width);
  if (!shared) return own;
  if constexpr (kCentered) {
    Acc brought[2] = {own.mean, own.squares};
    meeting.exchange(brought);
    const Acc weight = static_cast<Acc>(columns.template of_warp<kHeld>(meeting.stands_for()));
    const Acc mean = sum_of_lanes(weight * brought[0], meeting.width()) / static_cast<Acc>(cols);
    const Acc distance = brought[0] - mean;
    const Acc part = weight > Acc(0) ? brought[1] + weight * distance * distance : Acc(0);
    return {mean, sum_of_lanes(part, meeting.width())};
  } else {
    Acc brought[1] = {own.squares};
    meeting.exchange(brought);
    return {0, sum_of_lanes(brought[0], meeting.width())};
  }
}

}  // namespace warpwright
