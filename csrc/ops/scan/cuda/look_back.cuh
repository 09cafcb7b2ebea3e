// The carry into a tile, from the tiles before it, in a single pass (decoupled look-back: Merrill
// and Garland, NVIDIA NVR-2016-002). In two levels: a tile combines the totals of its group of 32
// tiles, then folds the totals of whole groups from the nearest known carry on.
//
// Within a group, lanes combine in a fixed tree. The carry after group g is advance(carry before g,
// total of g): a fold from the left. Any carry that is found first gives the same bits, so the
// timing of blocks cannot change them.
#pragma once

#include <cstdint>

#include "device/flagged.cuh"
#include "device/reduce.cuh"
#include "ops/scan/scan.h"

namespace warpwright {

// Memory that is zeroed before the launch has no flag.
constexpr uint64_t kIsThere = 1;

template <class Carry>
__device__ __forceinline__ uint64_t to_bits(Carry value) {
  static_assert(sizeof(Carry) == 8);
  return *reinterpret_cast<const uint64_t*>(&value);
}
template <class Carry>
__device__ __forceinline__ Carry from_bits(uint64_t bits) {
  return *reinterpret_cast<const Carry*>(&bits);
}

// The total of a tile or group, or the carry after a group, as kCount words.
template <int kCount, class Carry>
__device__ __forceinline__ void publish(Flagged* target, const Carry (&words)[kCount]) {
#pragma unroll
  for (int w = 0; w < kCount; ++w) store_flagged(target + w, to_bits(words[w]), kIsThere);
}
// Whether they are there.
template <int kCount, class Carry>
__device__ __forceinline__ bool load_words(const Flagged* source, Carry (&words)[kCount]) {
  bool is_there = true;
#pragma unroll
  for (int w = 0; w < kCount; ++w) {
    const Flagged word = load_flagged(source + w);
    words[w] = from_bits<Carry>(word.value);
    is_there &= word.flag == kIsThere;
  }
  return is_there;
}

// The published words of one row.
template <class Scan>
struct RowWords {
  Flagged* tiles;   // kWords each
  Flagged* groups;  // kWords of the total, and the carry after it

  __device__ Flagged* tile(int64_t index) const { return tiles + index * Scan::kWords; }
  __device__ Flagged* group(int64_t index) const { return groups + index * (Scan::kWords + 1); }
  __device__ Flagged* carry(int64_t index) const { return group(index) + Scan::kWords; }
};

// Of a whole warp: each lane gets the words of all lanes up to it, combined.
template <class Scan>
__device__ __forceinline__ void scan_lanes(typename Scan::Carry (&words)[Scan::kWords]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    typename Scan::Carry left[Scan::kWords];
#pragma unroll
    for (int w = 0; w < Scan::kWords; ++w) {
      left[w] = __shfl_up_sync(kFullMask, words[w], distance);
    }
    if (lane >= distance) Scan::join(left, words);
  }
}

// The carry into group `group` >= 1. Each lane reads one of the 32 groups before it. If none of
// their carries is known yet, one soon is, because blocks take tiles in order.
template <class Scan, class State>
__device__ typename Scan::Carry carry_into_group(const RowWords<Scan>& row, int64_t group,
                                                 State&& state_before_row) {
  using Carry = typename Scan::Carry;
  const int64_t index = group - kWarpSize + threadIdx.x % kWarpSize;
  Carry total[Scan::kWords] = {}, carry[1] = {};
  unsigned carries;
  int from;  // the first lane whose total is to be folded
  for (;;) {
    const bool has_total = index >= 0 && load_words(row.group(index), total);
    const bool has_carry = index >= 0 && load_words(row.carry(index), carry);
    carries = __ballot_sync(kFullMask, has_carry);
    const unsigned totals = __ballot_sync(kFullMask, has_total);
    from = kWarpSize - __clz(static_cast<int>(carries));
    if (carries == 0) {
      if (group > kWarpSize) continue;
      from = kWarpSize - static_cast<int>(group);  // the row's first group
    }
    const unsigned needed = from == kWarpSize ? 0 : kFullMask << from;
    if ((totals & needed) == needed) break;
  }
  Carry result = carries == 0 ? state_before_row() : Carry{};
  if (carries != 0) result = __shfl_sync(kFullMask, carry[0], from - 1);
#pragma unroll 4
  for (int i = from; i < kWarpSize; ++i) {
    Carry words[Scan::kWords];
#pragma unroll
    for (int w = 0; w < Scan::kWords; ++w) words[w] = __shfl_sync(kFullMask, total[w], i);
    result = Scan::advance(result, words);
  }
  return result;
}

// Publishes the total `own` of tile `tile` of a row, looks back, and returns the carry into the
// tile. The last tile of a group publishes the group's total and the carry after it. One whole warp
// calls, and all lanes get the result.
template <class Scan, class State>
__device__ typename Scan::Carry look_back(const RowWords<Scan>& row, int64_t tile,
                                          const typename Scan::Carry (&own)[Scan::kWords],
                                          State&& state_before_row) {
  using Carry = typename Scan::Carry;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t group = tile / kScanGroup;
  const int place = static_cast<int>(tile % kScanGroup);
  const bool is_last = place == kScanGroup - 1;
  if (lane == 0) publish(row.tile(tile), own);

  Carry words[Scan::kWords];
  bool is_there;
  do {
    is_there = lane >= place || load_words(row.tile(group * kScanGroup + lane), words);
  } while (!__all_sync(kFullMask, is_there));
  if (lane >= place) {
#pragma unroll
    for (int w = 0; w < Scan::kWords; ++w) {
      words[w] = lane == place ? own[w] : Scan::empty_word(w);
    }
  }
  scan_lanes<Scan>(words);
  if (is_last && lane == kWarpSize - 1) publish(row.group(group), words);

  Carry carry = group == 0 ? state_before_row() : carry_into_group(row, group, state_before_row);
  if (is_last && lane == kWarpSize - 1) {
    const Carry after[1] = {Scan::advance(carry, words)};
    publish(row.carry(group), after);
  }
  if (place == 0) return carry;
  Carry before[Scan::kWords];
#pragma unroll
  for (int w = 0; w < Scan::kWords; ++w) {
    before[w] = __shfl_sync(kFullMask, words[w], place - 1);
  }
  return Scan::advance(carry, before);
}

}  // namespace warpwright
