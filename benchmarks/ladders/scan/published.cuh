// What rungs 6 and 7 share: what blocks publish for the blocks after them, and the order of tiles.
#pragma once

#include "device/flagged.cuh"
#include "device/ticket.cuh"
#include "register_tile.cuh"

namespace ladder {

// Zeroed before the launch.
struct Published {
  int* tickets;                   // one
  warpwright::Flagged* totals;    // (tiles): of the tile
  warpwright::Flagged* prefixes;  // (tiles): of all elements up to the tile's last
};

__device__ __forceinline__ void publish(warpwright::Flagged* target, float value) {
  warpwright::store_flagged(target, __float_as_uint(value), 1);
}

// Whether it is there.
__device__ __forceinline__ bool read(const warpwright::Flagged* source, float& value) {
  const warpwright::Flagged found = warpwright::load_flagged(source);
  value = __uint_as_float(static_cast<unsigned>(found.value));
  return found.flag == 1;
}

// This block's tile. Blocks start in any order, but a tile's number says that all tiles before it
// have been taken by blocks that run: to wait for them is safe.
__device__ __forceinline__ int64_t take_tile(const Published& published, int& shared) {
  if (threadIdx.x == 0) shared = warpwright::take_ticket(published.tickets);
  __syncthreads();
  return shared;
}

inline Published published_of(const Problem& p) {
  const int64_t tiles = p.numel / kTile;
  const size_t bytes = 16 + 2 * static_cast<size_t>(tiles) * sizeof(warpwright::Flagged);
  warpwright::cuda_check(cudaMemsetAsync(p.workspace, 0, bytes, p.stream), "memset");
  auto* words = reinterpret_cast<warpwright::Flagged*>(p.workspace + 16);
  return {reinterpret_cast<int*>(p.workspace), words, words + tiles};
}

}  // namespace ladder
