// Barriers for some warps of a block. One PTX instruction per wrapper; its section of the PTX ISA
// manual is named above.
#pragma once

namespace warpwright {

// "bar". Barrier `id` (1..15; 0 is __syncthreads) for `threads` threads, in whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace warpwright
