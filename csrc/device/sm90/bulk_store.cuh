// Asynchronous copies of contiguous bytes from shared to global memory, without a tensor map, in
// the thread's open bulk group. One PTX instruction per wrapper; its section of the PTX ISA manual
// is named above. Addresses and `bytes` are multiples of 16. After ordinary stores to the shared
// memory, the writers must call fence_proxy_async() first.
#pragma once

#include <cstdint>

namespace warpwright {

// "cp.async.bulk", shared to global.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared), "r"(bytes)
               : "memory");
}

// "cp.reduce.async.bulk", .add of float32: the same, but adds to the values in memory. Writers of
// the same values must take turns, or their sums differ from run to run.
__device__ __forceinline__ void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared), "r"(bytes)
               : "memory");
}

// "membar / fence: fence.proxy.async". Orders this thread's ordinary accesses to all memory, also
// to turns in global memory, and asynchronous copies.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;\n" ::: "memory");
}

}  // namespace warpwright
