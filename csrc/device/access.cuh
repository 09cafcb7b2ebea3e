// Vectorized accesses that the compiler neither splits nor moves into a branch.
#pragma once

#include <cstdint>

#include "device/vec.cuh"

namespace warpwright {

// "cp.async": copies 16 bytes if `condition`. A predicate, not a branch, so that the compiler can
// schedule the copies of a loop between its math. Reads the first `source_bytes` and zero-fills the
// rest.
__device__ __forceinline__ void cp_async_if(bool condition, uint32_t shared, const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(condition))
      : "memory");
}

__device__ __forceinline__ void cp_async_if(bool condition, uint32_t shared, const void* global,
                                            int source_bytes) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(condition)), "r"(source_bytes)
      : "memory");
}

// The same for one 32-bit word, for data that is rearranged on its way. Passes through L1, because
// .cg takes 16 bytes only.
__device__ __forceinline__ void cp_async_word_if(bool condition, uint32_t shared,
                                                 const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.ca.shared.global.L2::128B [%0], [%1], 4;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(condition))
      : "memory");
}

// One 16-byte store to global memory. Next to an element-wise branch, or to scalar stores of a head
// and a tail, the compiler would merge the stores into narrow ones.
template <int kSize, class T>
__device__ __forceinline__ void store_vec_global(T* pointer, const Vec<T, kSize>& value) {
  if constexpr (sizeof(value) < kVecBytes) {
    store_vec(pointer, value);
  } else {
    static_assert(sizeof(value) == kVecBytes);
    const uint4 raw = *reinterpret_cast<const uint4*>(&value);
    asm volatile(
        "st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(__cvta_generic_to_global(pointer)),
        "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
        : "memory");
  }
}

// The same for two 32-bit elements at a multiple of 8 bytes.
__device__ __forceinline__ void store_pair_global(void* pointer, uint2 pair) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};\n" ::"l"(__cvta_generic_to_global(pointer)),
               "r"(pair.x), "r"(pair.y)
               : "memory");
}

// The same for two 16-bit elements at a multiple of 4 bytes.
__device__ __forceinline__ void store_pair_global(void* pointer, uint32_t pair) {
  asm volatile("st.global.b32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(pointer)), "r"(pair)
               : "memory");
}

}  // namespace warpwright
