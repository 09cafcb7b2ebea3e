// The kernel of fused.cuh in clusters, whose CTAs share k and add their sums through each other's
// shared memory.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "ops/linear_quantized/cuda/fused.cuh"

namespace warpwright {

struct ClusterCtas {
  static __device__ __forceinline__ int count(const FusedParams& p) { return p.ranks; }
  static __device__ __forceinline__ void sync() {
    cluster_arrive();
    cluster_wait();
  }
  static __device__ __forceinline__ float load(const float* part, int rank) {
    return load_cluster(map_to_cta(smem_address(part), static_cast<uint32_t>(rank)), 0.0f);
  }
  static __device__ __forceinline__ void end() { sync(); }
};

template <class T, class S, int kBits, int kTiles, bool kZeros>
__global__ void __launch_bounds__(kQuantizedThreads, kQuantizedCtasPerSm)
    linear_quantized_sm90_kernel(const __grid_constant__ FusedParams p) {
  if constexpr (kHasSm90a) {
    extern __shared__ __align__(16) char shared[];
    multiply_features<T, S, kBits, kTiles, kZeros, ClusterCtas>(p, shared);
  }
}

}  // namespace warpwright
