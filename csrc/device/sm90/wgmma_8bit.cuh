// wgmma of 8-bit operands (sm_90a): floats with float32 sums, integers with int32 sums. Both
// operands are K-major: no other layout exists for 8 bits. A step is 32 k, 32 bytes, so descriptors
// and the order of accumulators are those of wgmma.cuh. The sums of 8-bit floats keep fewer bits
// than float32 and are cut towards zero. The caller moves them to float32 registers often enough
// (tile/mainloop_8bit_sm90.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fp8.cuh"
#include "device/sm90/wgmma.cuh"

namespace warpwright {

// Prevents the compiler from moving accesses to `d` past this point.
template <int kRegs>
__device__ __forceinline__ void wgmma_pin(int32_t (&d)[kRegs]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Operand lists. UNITS is %0 to %9, TEN(t) is %t0 to %t9.
#define WARPWRIGHT_UNITS "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"
#define WARPWRIGHT_TEN(t)                                                                  \
  ", %" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t \
  "8, %" #t "9"
#define WARPWRIGHT_60 \
  WARPWRIGHT_UNITS    \
  WARPWRIGHT_TEN(1) WARPWRIGHT_TEN(2) WARPWRIGHT_TEN(3) WARPWRIGHT_TEN(4) WARPWRIGHT_TEN(5)
#define WARPWRIGHT_90 WARPWRIGHT_60 WARPWRIGHT_TEN(6) WARPWRIGHT_TEN(7) WARPWRIGHT_TEN(8)
#define WARPWRIGHT_LIST_32 WARPWRIGHT_UNITS WARPWRIGHT_TEN(1) WARPWRIGHT_TEN(2) ", %30, %31"
#define WARPWRIGHT_LIST_64 WARPWRIGHT_60 ", %60, %61, %62, %63"
#define WARPWRIGHT_LIST_96 WARPWRIGHT_90 ", %90, %91, %92, %93, %94, %95"
#define WARPWRIGHT_LIST_128                          \
  WARPWRIGHT_90 WARPWRIGHT_TEN(9) WARPWRIGHT_TEN(10) \
      WARPWRIGHT_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WARPWRIGHT_D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define WARPWRIGHT_D16(c, i) \
  WARPWRIGHT_D4(c, i), WARPWRIGHT_D4(c, i + 4), WARPWRIGHT_D4(c, i + 8), WARPWRIGHT_D4(c, i + 12)
#define WARPWRIGHT_D32(c, i) WARPWRIGHT_D16(c, i), WARPWRIGHT_D16(c, i + 16)
#define WARPWRIGHT_D64(c, i) WARPWRIGHT_D32(c, i), WARPWRIGHT_D32(c, i + 32)
#define WARPWRIGHT_D96(c, i) WARPWRIGHT_D64(c, i), WARPWRIGHT_D32(c, i + 64)
#define WARPWRIGHT_D128(c, i) WARPWRIGHT_D64(c, i), WARPWRIGHT_D64(c, i + 64)

// scale-d false ignores the old accumulators. Floats have two more immediates, imm-scale 1.
#define WARPWRIGHT_WGMMA_8BIT(shape, types, c, scales, regs, a_, b_, p_)                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p_                                        \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned." shape "k32." types " {" WARPWRIGHT_LIST_##regs \
               "}, %" a_ ", %" b_ ", p" scales ";\n}\n"                                       \
               : WARPWRIGHT_D##regs(c, 0)                                                     \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define WARPWRIGHT_WGMMA_8BIT_WIDTHS(types, c, scales)                            \
  if constexpr (kRegs == 32) {                                                    \
    WARPWRIGHT_WGMMA_8BIT("m64n64", types, c, scales, 32, "32", "33", "34");      \
  } else if constexpr (kRegs == 64) {                                             \
    WARPWRIGHT_WGMMA_8BIT("m64n128", types, c, scales, 64, "64", "65", "66");     \
  } else if constexpr (kRegs == 96) {                                             \
    WARPWRIGHT_WGMMA_8BIT("m64n192", types, c, scales, 96, "96", "97", "98");     \
  } else {                                                                        \
    static_assert(kRegs == 128, "N = 64, 128, 192 or 256");                       \
    WARPWRIGHT_WGMMA_8BIT("m64n256", types, c, scales, 128, "128", "129", "130"); \
  }
#define WARPWRIGHT_FLOATS(x) "+f"(x)
#define WARPWRIGHT_INTEGERS(x) "+r"(x)

// "wgmma.mma_async", m64nNk32, N = 2 * kRegs. A and B: the operands' types.
template <class A, class B, int kRegs>
__device__ __forceinline__ void wgmma_8bit(float (&d)[kRegs], uint64_t a, uint64_t b,
                                           bool accumulate) {
  constexpr bool kWideA = std::is_same_v<A, fp8_e5m2>, kWideB = std::is_same_v<B, fp8_e5m2>;
  static_assert(kWideA || std::is_same_v<A, fp8_e4m3>);
  static_assert(kWideB || std::is_same_v<B, fp8_e4m3>);
  if constexpr (kWideA && kWideB) {
    WARPWRIGHT_WGMMA_8BIT_WIDTHS("f32.e5m2.e5m2", WARPWRIGHT_FLOATS, ", 1, 1")
  } else if constexpr (kWideA) {
    WARPWRIGHT_WGMMA_8BIT_WIDTHS("f32.e5m2.e4m3", WARPWRIGHT_FLOATS, ", 1, 1")
  } else if constexpr (kWideB) {
    WARPWRIGHT_WGMMA_8BIT_WIDTHS("f32.e4m3.e5m2", WARPWRIGHT_FLOATS, ", 1, 1")
  } else {
    WARPWRIGHT_WGMMA_8BIT_WIDTHS("f32.e4m3.e4m3", WARPWRIGHT_FLOATS, ", 1, 1")
  }
}
template <class A, class B, int kRegs>
__device__ __forceinline__ void wgmma_8bit(int32_t (&d)[kRegs], uint64_t a, uint64_t b,
                                           bool accumulate) {
  static_assert(std::is_same_v<A, int8_t> && std::is_same_v<B, int8_t>);
  WARPWRIGHT_WGMMA_8BIT_WIDTHS("s32.s8.s8", WARPWRIGHT_INTEGERS, "")
}

#undef WARPWRIGHT_INTEGERS
#undef WARPWRIGHT_FLOATS
#undef WARPWRIGHT_WGMMA_8BIT_WIDTHS
#undef WARPWRIGHT_WGMMA_8BIT
#undef WARPWRIGHT_D128
#undef WARPWRIGHT_D96
#undef WARPWRIGHT_D64
#undef WARPWRIGHT_D32
#undef WARPWRIGHT_D16
#undef WARPWRIGHT_D4
#undef WARPWRIGHT_LIST_128
#undef WARPWRIGHT_LIST_96
#undef WARPWRIGHT_LIST_64
#undef WARPWRIGHT_LIST_32
#undef WARPWRIGHT_90
#undef WARPWRIGHT_60
#undef WARPWRIGHT_TEN
#undef WARPWRIGHT_UNITS

}  // namespace warpwright
