// A barrier for some warps of a block.
#pragma once

namespace warpwright {

// "bar.sync". Barrier `id` (1..15; 0 is __syncthreads) for `threads` threads, in whole warps.
__device__ __forceinline__ void group_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace warpwright
