// Asynchronous copies without a tensor map, whose bytes an mbarrier counts: contiguous bytes from
// global to shared memory, and a few registers to another CTA of the cluster. One PTX instruction
// per wrapper; its section of the PTX ISA manual is named above.
#pragma once

#include <cstdint>

namespace warpwright {

// "cp.async.bulk", global to shared. Both addresses and `bytes` are multiples of 16; `barrier` of
// this CTA counts the bytes.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
      : "memory");
}

// "st.async". Stores 16 bytes to a CTA of the cluster; a barrier of the same CTA counts them (both
// addresses from map_to_cta). A wait at CTA scope is enough to read them. A wait at cluster scope
// would only invalidate L1 as well, which does not hold shared memory.
__device__ __forceinline__ void store_async(uint32_t mapped, const float (&value)[4],
                                            uint32_t mapped_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(mapped),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(mapped_barrier)
      : "memory");
}

}  // namespace warpwright
