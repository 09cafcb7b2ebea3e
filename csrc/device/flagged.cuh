// Values that blocks hand to later blocks of the same grid.
#pragma once

#include <cstdint>

namespace warpwright {

// A value of 8 bytes and its flag. One 16-byte access moves both, so a reader that sees the flag
// also has the value, and no fence is needed.
struct alignas(16) Flagged {
  uint64_t value;
  uint64_t flag;
};

// "st", .b128: both words become visible to the GPU at once.
__device__ __forceinline__ void store_flagged(Flagged* target, uint64_t value, uint64_t flag) {
  asm volatile(
      "{\n"
      ".reg .b128 pair;\n"
      "mov.b128 pair, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], pair;\n"
      "}\n" ::"l"(__cvta_generic_to_global(target)),
      "l"(value), "l"(flag)
      : "memory");
}

// "ld", .b128: reads L2, where other SMs' stores arrive.
__device__ __forceinline__ Flagged load_flagged(const Flagged* source) {
  Flagged result;
  asm volatile(
      "{\n"
      ".reg .b128 pair;\n"
      "ld.relaxed.gpu.global.b128 pair, [%2];\n"
      "mov.b128 {%0, %1}, pair;\n"
      "}\n"
      : "=l"(result.value), "=l"(result.flag)
      : "l"(__cvta_generic_to_global(source))
      : "memory");
  return result;
}

// "st", .release: the thread's writes before it are visible to whoever acquires the flag.
__device__ __forceinline__ void release_flag(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(flag)),
               "r"(value)
               : "memory");
}

// "ld", .acquire.
__device__ __forceinline__ int acquire_flag(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(flag))
               : "memory");
  return value;
}

}  // namespace warpwright
