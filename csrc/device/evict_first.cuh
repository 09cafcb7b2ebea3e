// Evict-first loads, for data read once. L2 drops these lines first, so other kernels' dirty lines
// are not written back to make room.
#pragma once

#include <cstdint>

namespace warpwright {

// "createpolicy": the policy for the accesses below and for TMA.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// "cp.async" of 16 bytes; both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_evict_first(uint32_t shared, const void* global,
                                                     uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "l"(policy)
               : "memory");
}

}  // namespace warpwright
