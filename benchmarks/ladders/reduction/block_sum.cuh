// What rungs 4 and 5 share: a block's part of the sum, with 16-byte loads, eight of them in flight.
#pragma once

#include "ladder.cuh"

namespace ladder {

constexpr int kSumThreads = 256;
constexpr int kInFlight = 8;
constexpr int kVec = 4;  // floats per load
constexpr int kSumWarps = kSumThreads / warpwright::kWarpSize;
constexpr int kBlocksPerSm = 4;

// The sum of this block's elements, in every thread. x: (numel), numel a multiple of kVec.
// Grid: any size. Thread t of block b takes vectors bT + t, bT + t + GT, ...; G blocks of T
// threads.
__device__ __forceinline__ float block_sum(const float* x, int64_t numel, float* shared) {
  const int64_t step = int64_t{gridDim.x} * kSumThreads;
  const int64_t vectors = numel / kVec;
  float sums[kInFlight] = {};
  int64_t v = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  for (; v + (kInFlight - 1) * step < vectors; v += kInFlight * step) {
    warpwright::Vec<float, kVec> loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      loaded[i] = warpwright::load_vec_streaming<kVec>(x + (v + i * step) * kVec);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      sums[i] += (loaded[i][0] + loaded[i][1]) + (loaded[i][2] + loaded[i][3]);
    }
  }
  for (; v < vectors; v += step) {
    warpwright::Vec<float, kVec> loaded = warpwright::load_vec<kVec>(x + v * kVec);
    sums[0] += (loaded[0] + loaded[1]) + (loaded[2] + loaded[3]);
  }
  const float sum = warpwright::tree_sum<kInFlight>([&](int i) { return sums[i]; });
  return warpwright::block_reduce(sum, warpwright::Sum{}, 0.f, shared);
}

inline unsigned sum_blocks() {
  return static_cast<unsigned>(warpwright::current_device_info().num_sms * kBlocksPerSm);
}

}  // namespace ladder
