// TMA of five-dimensional tensors, as device/sm90/tma.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace warpwright {

// "cp.async.bulk.tensor", global to shared.
__device__ __forceinline__ void tma_load_5d(uint32_t shared, const CUtensorMap* map, int c0, int c1,
                                            int c2, int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// The same, shared to global.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                             int c4, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];\n" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace warpwright
