// Reads of what nobody reads again: L2 gives up such lines first, and keeps what others have left
// there, which if they have written it would have to go to memory meanwhile.
#pragma once

#include <cstdint>

namespace warpwright {

// "createpolicy": for the accesses below, and those of TMA.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// "cp.async", 16 bytes between multiples of 16 bytes.
__device__ __forceinline__ void cp_async_evict_first(uint32_t shared, const void* global,
                                                     uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "l"(policy)
               : "memory");
}

}  // namespace warpwright
