// Integer helpers shared by every kernel.
#pragma once

#include <cstdint>

#include "common/ceil_div.h"

namespace warpwright {

// Hides the pointer's origin from the compiler, which then increments one pointer instead of
// keeping an address per iteration in registers.
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// The same for a pointer to global memory: the compiler still emits global accesses.
template <class T>
__device__ __forceinline__ T* opaque_global(T* pointer) {
#ifdef __CUDA_ARCH__
  size_t address = __cvta_generic_to_global(pointer);
  asm("" : "+l"(address));
  return static_cast<T*>(__cvta_global_to_generic(address));
#else
  return pointer;
#endif
}

// Hides the value's origin from the compiler, which then recomputes expressions of it in each
// iteration instead of keeping their results in registers.
__device__ __forceinline__ int derive_anew(int value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// Hides how the value was computed. The compiler keeps it in a register instead of computing it
// again in each iteration.
__device__ __forceinline__ uint32_t keep_value(uint32_t value) {
#ifdef __CUDA_ARCH__
  asm("" : "+r"(value));
#endif
  return value;
}
__device__ __forceinline__ int keep_value(int value) {
  return static_cast<int>(keep_value(static_cast<uint32_t>(value)));
}

// A product that is rounded before it is added to anything: the compiler does not contract it.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// Quotient and remainder by a divisor known at launch: one multiply-high, one shift.
// Exact for 0 <= n < 2^31 and 1 <= divisor < 2^31 (Granlund & Montgomery, PLDI 1994, fig. 4.1).
struct FastDivmod {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDivmod() = default;
  __host__ explicit FastDivmod(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while (shift < 32 && (uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(
        ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  __device__ __forceinline__ int quotient(int n) const {
    const uint32_t u = static_cast<uint32_t>(n);
    return static_cast<int>((__umulhi(u, multiplier) + u) >> shift);
  }
  __device__ __forceinline__ void divmod(int n, int& q, int& r) const {
    q = quotient(n);
    r = n - q * static_cast<int>(divisor);
  }
};

}  // namespace warpwright
