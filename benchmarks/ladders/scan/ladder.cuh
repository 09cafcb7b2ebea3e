// What the rungs share: the call, what a rung says about itself, and the scan of a warp. entry.cu
// calls launch_rung(); each rung's file defines it and kRung.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"

namespace ladder {

// y[i] = x[0] + ... + x[i].
struct Problem {
  const float* x;   // (numel)
  float* y;         // (numel)
  char* workspace;  // 4 bytes per element, and a MiB
  int64_t numel;
  cudaStream_t stream;

  float* floats() const { return reinterpret_cast<float*>(workspace); }
};

// numel is a multiple of `tile`.
struct Rung {
  int tile;        // elements of a block
  int threads;     // of a block
  int smem_bytes;  // of a block
};

extern const Rung kRung;
void launch_rung(const Problem& p);

inline std::string describe(const Rung& r) {
  return said("tile", r.tile) + said("threads", r.threads) + said("smem_bytes", r.smem_bytes);
}

// tensors: x, workspace, y. extents: numel.
inline Problem problem_of(void* const* tensors, const int64_t* extents, cudaStream_t stream) {
  const Problem p = {static_cast<const float*>(tensors[0]), static_cast<float*>(tensors[2]),
                     static_cast<char*>(tensors[1]), extents[0], stream};
  check_extent("elements", p.numel, kRung.tile);
  check_pointer("x", p.x);
  check_pointer("workspace", p.workspace);
  check_pointer("y", p.y);
  return p;
}

// Each lane gets the sum of the values of all lanes up to its own.
__device__ __forceinline__ float scan_warp(float value) {
#pragma unroll
  for (int distance = 1; distance < warpwright::kWarpSize; distance *= 2) {
    const float left = __shfl_up_sync(warpwright::kFullMask, value, distance);
    if (static_cast<int>(threadIdx.x % warpwright::kWarpSize) >= distance) value += left;
  }
  return value;
}

// The sum of the values of all threads of the block before this one, and the sum of all threads.
// `shared`: one float per warp.
template <int kThreads>
__device__ __forceinline__ float scan_block(float value, float* shared, float& total) {
  constexpr int kWarps = kThreads / warpwright::kWarpSize;
  const int lane = threadIdx.x % warpwright::kWarpSize;
  const int warp = threadIdx.x / warpwright::kWarpSize;
  const float up_to = scan_warp(value);
  float before = __shfl_up_sync(warpwright::kFullMask, up_to, 1);
  if (lane == 0) before = 0;
  __syncthreads();  // nobody reads the last call's sums any more
  if (lane == warpwright::kWarpSize - 1) shared[warp] = up_to;
  __syncthreads();
  total = 0;
  float into_warp = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) into_warp = total;
    total += shared[w];
  }
  return into_warp + before;
}

}  // namespace ladder
