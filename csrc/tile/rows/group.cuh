// Groups of threads that own a row together, and their sums in a fixed order.
#pragma once

#include "device/named_barrier.cuh"
#include "device/reduce.cuh"

namespace warpwright {

constexpr int kMaxRowWarps = 32;  // of a block

// `lanes` neighbouring threads: a power of two up to a warp, or whole warps.
struct RowGroup {
  int lanes;
  int lane;   // of this thread
  int index;  // of the group in its block
  int count;  // groups in the block

  __device__ __forceinline__ explicit RowGroup(int lanes_)
      : lanes(lanes_),
        lane(static_cast<int>(threadIdx.x) % lanes_),
        index(static_cast<int>(threadIdx.x) / lanes_),
        count(static_cast<int>(blockDim.x) / lanes_) {}

  // All threads of the block.
  __device__ __forceinline__ RowGroup()
      : lanes(static_cast<int>(blockDim.x)),
        lane(static_cast<int>(threadIdx.x)),
        index(0),
        count(1) {}

  __device__ __forceinline__ int warps() const { return lanes / kWarpSize; }  // 0: less than one
};

// Adds up `width` neighbouring lanes, a power of two up to a warp; all of them get the same bits.
// All lanes of the warp must call.
template <class Acc>
__device__ __forceinline__ Acc sum_of_lanes(Acc value, int width) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    // The shuffle has no condition: it would be a branch, and sums side by side would not overlap.
    const Acc other = __shfl_xor_sync(kFullMask, value, offset);
    value = offset < width ? value + other : value;
  }
  return value;
}

// Where the warps of a group meet: double-buffered, so that one barrier per meeting is enough. All
// threads of the block share one `storage` of kSlots<kCount> numbers.
template <class Acc, int kCount>
class RowMeeting {
 public:
  static constexpr int kSlots = 2 * kMaxRowWarps * kCount;

  __device__ __forceinline__ RowMeeting(const RowGroup& group, Acc* storage)
      : storage_(storage + group.index * group.warps() * kCount),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        warp_(group.lane / kWarpSize),
        warps_(group.warps()),
        width_(1),
        lanes_(group.lanes),
        barrier_(1 + group.index),
        alone_(group.count == 1) {
    while (width_ < warps_) width_ *= 2;
  }

  // How many lanes represent the group's warps after exchange(): a power of two. The warp's other
  // lanes repeat them.
  __device__ __forceinline__ int width() const { return width_; }
  // The warp that this lane represents. The group may not have a warp of that number.
  __device__ __forceinline__ int stands_for() const { return lane_ & (width_ - 1); }

  // Returns in `own` the numbers of warp stands_for(), or zeros if there is none. The first lane of
  // each warp provides `own`.
  __device__ __forceinline__ void exchange(Acc (&own)[kCount]) {
    Acc* buffer = storage_ + phase_ * kMaxRowWarps * kCount;
    phase_ ^= 1;
    if (lane_ == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) buffer[warp_ * kCount + i] = own[i];
    }
    if (alone_) {
      __syncthreads();
    } else {
      named_barrier_sync(barrier_, lanes_);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      own[i] = stands_for() < warps_ ? buffer[stands_for() * kCount + i] : Acc(0);
    }
  }

  // Every thread gets the sums over its group, in the same bits.
  __device__ __forceinline__ void sum(Acc (&values)[kCount]) {
    const int width = lanes_ < kWarpSize ? lanes_ : kWarpSize;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = sum_of_lanes(values[i], width);
    if (warps_ <= 1) return;
    exchange(values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = sum_of_lanes(values[i], width_);
  }

 private:
  Acc* storage_;
  int lane_, warp_, warps_, width_, lanes_, barrier_;
  bool alone_;
  int phase_ = 0;
};

}  // namespace warpwright
