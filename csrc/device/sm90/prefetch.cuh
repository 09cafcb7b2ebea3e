// Loads to L2 only, ahead of the copy to shared memory.
#pragma once

#include <cuda.h>

namespace warpwright {

// "cp.async.bulk.prefetch.tensor": the box that tma_load_4d() copies.
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap* map, int c0, int c1, int c2,
                                                int c3) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];\n" ::"l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace warpwright
