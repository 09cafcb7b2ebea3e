// What rungs 3 to 5 share: how blocks walk over rows, the merge of a block's statistics, and the
// write.
#pragma once

#include "ladder.cuh"

namespace ladder {

constexpr int kVec = 8;                   // channels per 16-byte access
constexpr int kLanes = kChannels / kVec;  // threads per row: a line of 128 bytes
constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kLanes;  // rows that a block reads at once
constexpr int kInFlight = 4;                // loads of a thread
constexpr int kStep = kGroups * kInFlight;  // rows of a block's step
constexpr int kBlocksPerSm = 4;

inline unsigned row_blocks() {
  return static_cast<unsigned>(warpwright::current_device_info().num_sms * kBlocksPerSm);
}

using Eight = warpwright::Vec<float, kVec>;

// Steps are dealt out to the blocks in turns, from the first row to the last, or backwards. f(row,
// eight values) gets the thread's channels of its rows. rows is a multiple of kStep.
template <bool kBackwards, class F>
__device__ __forceinline__ void for_rows(const bf16* x, int64_t rows, const F& f) {
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t steps = rows / kStep;
  for (int64_t s = blockIdx.x; s < steps; s += gridDim.x) {
    const int64_t first = (kBackwards ? steps - 1 - s : s) * kStep + group;
    warpwright::Vec<bf16, kVec> loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t row = first + i * kGroups;
      loaded[i] = warpwright::load_vec<kVec>(x + row * kChannels + lane * kVec);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) f(first + i * kGroups, warpwright::widen(loaded[i]));
  }
}

// Merges one state per thread and channel, in the order of the block's groups. to: (kChannels),
// this block's.
template <class State, class Merge>
__device__ __forceinline__ void merge_block(const State (&own)[kVec], State* shared, State* to,
                                            Merge merge) {
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kVec; ++i) shared[group * kChannels + lane * kVec + i] = own[i];
  __syncthreads();
  if (threadIdx.x < kChannels) {
    State all = shared[threadIdx.x];
    for (int g = 1; g < kGroups; ++g) all = merge(all, shared[g * kChannels + threadIdx.x]);
    to[threadIdx.x] = all;
  }
}

// One block of 1024 threads: merges the blocks' states in a fixed order. Returns the channel's in
// the first 64 threads.
constexpr int kFinishThreads = 1024;
template <class State, class Merge>
__device__ __forceinline__ State merge_blocks(const State* states, int blocks, State* shared,
                                              Merge merge) {
  constexpr int kParts = kFinishThreads / kChannels;
  const int c = threadIdx.x % kChannels, part = threadIdx.x / kChannels;
  State all{};
#pragma unroll 4
  for (int b = part; b < blocks; b += kParts) all = merge(all, states[b * kChannels + c]);
  shared[threadIdx.x] = all;
  __syncthreads();
  for (int i = 1; part == 0 && i < kParts; ++i) all = merge(all, shared[i * kChannels + c]);
  return all;
}

// mean and factor: (kChannels), y = (x - mean) factor + bias.
template <bool kBackwards>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    apply_kernel(Problem p, const float* mean, const float* factor) {
  const int channel = threadIdx.x % kLanes * kVec;
  float center[kVec], slope[kVec], bias[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    center[i] = mean[channel + i];
    slope[i] = factor[channel + i];
    bias[i] = p.bias[channel + i];
  }
  for_rows<kBackwards>(p.x, p.rows, [&](int64_t row, Eight x) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = (x[i] - center[i]) * slope[i] + bias[i];
    warpwright::store_vec_streaming(p.y + row * kChannels + channel,
                                    warpwright::narrow<bf16, kVec>(x));
  });
}

}  // namespace ladder
