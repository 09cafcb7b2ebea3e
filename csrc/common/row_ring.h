// The shared memory of a ring of rows (tile/rows/ring.cuh), by which norms and softmax size a
// block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"

namespace warpwright {

constexpr int64_t kRingBytes = 192 * 1024;   // at most, for kRingThreads
constexpr int kRingThreads = 512;            // per block, at most
constexpr int64_t kMeetingBytes = 2 * 1024;  // at most, for the sums that a row's warps exchange

// The most threads per block, in whole warps, such that their ring and `beside` bytes of other data
// fit the shared memory. A Hopper fits all kRingThreads; compute capability 8.6 and 8.9 fit half of
// them.
constexpr int ring_threads(const DeviceInfo& device, int64_t beside = 0) {
  const int64_t room = device.smem_per_block - kMeetingBytes - beside;
  return static_cast<int>(
      std::clamp<int64_t>(room * kRingThreads / kRingBytes / 32 * 32, 32, kRingThreads));
}

}  // namespace warpwright
