// Mean and squared deviations of a row in registers: exact in one read, as each warp takes its
// deviations from its own mean, and the warps' results are merged by the formula of Chan et al.
// (1979).
#pragma once

#include "tile/rows/held.cuh"

namespace warpwright {

template <class Acc>
struct RowMoments {
  Acc mean;
  Acc squares;  // sum of (x - mean)^2; not centered: of x^2
};

// The meeting of row_moments().
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
    // From here on a lane stands for the warp of its number.
    Acc brought[2] = {own.mean, own.squares};
    meeting.exchange(brought);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const Acc weight = static_cast<Acc>(columns.template of_warp<kHeld>(lane));
    const Acc all = static_cast<Acc>(cols);
    const bool real = lane * kWarpSize < columns.lanes;
    const Acc mean = sum_of_lanes(real ? weight / all * brought[0] : Acc(0), kWarpSize);
    const Acc distance = brought[0] - mean;
    const Acc part = real ? brought[1] + weight * distance * distance : Acc(0);
    return {mean, sum_of_lanes(part, kWarpSize)};
  } else {
    Acc brought[1] = {own.squares};
    meeting.exchange(brought);
    return {0, sum_of_lanes(brought[0], kWarpSize)};
  }
}

}  // namespace warpwright
