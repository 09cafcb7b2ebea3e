// A copy to shared memory of half a vector's width.
#pragma once

#include <cstdint>

namespace warpwright {

// "cp.async": copies 8 bytes if `condition`. A predicate, as cp_async_if(). Passes through L1,
// because .cg takes 16 bytes only.
__device__ __forceinline__ void cp_async_half_if(bool condition, uint32_t shared,
                                                 const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.ca.shared.global.L2::128B [%0], [%1], 8;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(condition))
      : "memory");
}

}  // namespace warpwright
