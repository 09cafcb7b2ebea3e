// What rungs 3 to 5 share: the scan of the tiles' sums by one block.
#pragma once

#include "ladder.cuh"

namespace ladder {

constexpr int kSumsThreads = 1024;

// One block: sums become the sums before each tile.
__global__ void __launch_bounds__(kSumsThreads) sums_kernel(float* sums, int64_t tiles) {
  __shared__ float shared[kSumsThreads / warpwright::kWarpSize];
  float before = 0;
  for (int64_t first = 0; first < tiles; first += kSumsThreads) {
    const int64_t i = first + threadIdx.x;
    const float own = i < tiles ? sums[i] : 0.f;
    float total;
    const float into_tile = before + scan_block<kSumsThreads>(own, shared, total);
    if (i < tiles) sums[i] = into_tile;
    before += total;
  }
}

inline void scan_sums(float* sums, int64_t tiles, cudaStream_t stream) {
  warpwright::launch(sums_kernel, dim3(1), dim3(kSumsThreads), 0, stream, sums, tiles);
}

}  // namespace ladder
