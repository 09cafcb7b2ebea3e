// What rungs 5 to 7 share: a tile in registers, 16 neighbouring elements per thread.
#pragma once

#include "ladder.cuh"

namespace ladder {

constexpr int kTileThreads = 512;
constexpr int kItems = 16;
constexpr int kVec = 4;
constexpr int kTile = kTileThreads * kItems;
constexpr int kTileWarps = kTileThreads / warpwright::kWarpSize;
// A word of padding after each thread's 16: thread t reads from bank 17 t + i, and 17 is odd.
constexpr int kPitch = kItems + 1;

struct TileShared {
  float sums[kTileWarps];
  float elements[kTileThreads * kPitch];

  __device__ float& at(int i) { return elements[i / kItems * kPitch + i % kItems]; }
};

struct RegisterTile {
  float items[kItems];
  float before;  // the sum of the tile's elements before this thread's
  float total;   // of the tile

  // Memory is read in lines, by neighbouring lanes. Shared memory hands each thread its neighbours.
  __device__ void load(const float* x, TileShared& shared) {
#pragma unroll
    for (int r = 0; r < kItems / kVec; ++r) {
      const int first = (r * kTileThreads + static_cast<int>(threadIdx.x)) * kVec;
      const warpwright::Vec<float, kVec> loaded = warpwright::load_vec_streaming<kVec>(x + first);
#pragma unroll
      for (int i = 0; i < kVec; ++i) shared.at(first + i) = loaded[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] = shared.at(threadIdx.x * kItems + i);
  }

  // A thread adds its 16 alone; only the threads' sums need shuffles.
  __device__ void scan(TileShared& shared) {
#pragma unroll
    for (int i = 1; i < kItems; ++i) items[i] += items[i - 1];
    before = scan_block<kTileThreads>(items[kItems - 1], shared.sums, total);
  }

  // y: the tile's. into_tile: the sum of all elements before the tile.
  __device__ void store(float* y, float into_tile, TileShared& shared) {
    const float into_thread = into_tile + before;
#pragma unroll
    for (int i = 0; i < kItems; ++i) shared.at(threadIdx.x * kItems + i) = into_thread + items[i];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kItems / kVec; ++r) {
      const int first = (r * kTileThreads + static_cast<int>(threadIdx.x)) * kVec;
      warpwright::Vec<float, kVec> result;
#pragma unroll
      for (int i = 0; i < kVec; ++i) result[i] = shared.at(first + i);
      warpwright::store_vec_streaming(y + first, result);
    }
  }
};

}  // namespace ladder
