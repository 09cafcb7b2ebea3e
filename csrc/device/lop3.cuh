// "Logic and Shift Instructions: lop3".
#pragma once

#include <cstdint>

namespace warpwright {

// (x & mask) | bits. The compiler would make two instructions of two constants.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

}  // namespace warpwright
