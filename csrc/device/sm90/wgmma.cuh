// wgmma: a warpgroup's asynchronous matrix product from shared memory into registers (sm_90a).
// The section of the PTX ISA manual, "Asynchronous Warpgroup Level Matrix Instructions", is named
// above each wrapper.
//
// Order of a batch: wgmma_fence(), products, wgmma_commit(), wgmma_wait<n>(). Nothing may touch the
// accumulators between the first product and the wait, or ptxas serialises the products ("C7510").
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/types.cuh"

namespace warpwright {

// "wgmma.fence": registers written before it are ready for the following products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
// "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// "wgmma.wait_group": waits until all but the kPending newest groups are complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Prevents the compiler from moving accesses to `d` past this point.
template <int kRegs>
__device__ __forceinline__ void wgmma_pin(float (&d)[kRegs]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for an A operand in registers.
template <int kSteps>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[step][i])::"memory");
}

// "Matrix Descriptor Format". Bits 0-13: start address / 16; 16-29: leading dimension byte offset
// / 16; 32-45: stride dimension byte offset / 16; 49-51: base offset, 0 because the swizzle's
// 1024-byte patterns are aligned to 1024 bytes; 62-63: swizzle, 1 = 128 bytes.
//
// Both layouts are what TMA writes with 128-byte swizzle, boxes of 128 bytes times rows:
//   K-major:  a row (of M or N) is 128 bytes of k; 8 rows are a pattern, the next 8 lie `stride`
//             = 1024 bytes on; the leading offset is not used. 32 bytes of k are one wgmma.
//   MN-major: (16-bit only) a row (of k) is 64 elements of M or N; 8 rows of k are a pattern, the
//             next 8 lie `stride` = 1024 bytes on; the next 64 elements of M or N `leading` bytes.
//             16 rows of k = 2048 bytes are one wgmma.
constexpr uint64_t wgmma_descriptor_fields(uint32_t leading_bytes, uint32_t stride_bytes) {
  return uint64_t{leading_bytes >> 4} << 16 | uint64_t{stride_bytes >> 4} << 32 | uint64_t{1} << 62;
}
__device__ __forceinline__ uint64_t wgmma_descriptor(uint64_t fields, uint32_t shared) {
  return fields | (shared & 0x3FFFF) >> 4;
}

// Operand lists for the widths in use. The number is the accumulator registers per thread.
#define WARPWRIGHT_WGMMA_LIST_4 "%0, %1, %2, %3"
#define WARPWRIGHT_WGMMA_LIST_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WARPWRIGHT_WGMMA_LIST_48                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47"
#define WARPWRIGHT_WGMMA_LIST_64                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WARPWRIGHT_WGMMA_LIST_96                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WARPWRIGHT_WGMMA_LIST_128                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, " \
  "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "   \
  "%124, %125, %126, %127"
#define WARPWRIGHT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WARPWRIGHT_D16(i) \
  WARPWRIGHT_D4(i), WARPWRIGHT_D4(i + 4), WARPWRIGHT_D4(i + 8), WARPWRIGHT_D4(i + 12)
#define WARPWRIGHT_D32(i) WARPWRIGHT_D16(i), WARPWRIGHT_D16(i + 16)
#define WARPWRIGHT_D48(i) WARPWRIGHT_D32(i), WARPWRIGHT_D16(i + 32)
#define WARPWRIGHT_D64(i) WARPWRIGHT_D32(i), WARPWRIGHT_D32(i + 32)
#define WARPWRIGHT_D96(i) WARPWRIGHT_D64(i), WARPWRIGHT_D32(i + 64)
#define WARPWRIGHT_D128(i) WARPWRIGHT_D64(i), WARPWRIGHT_D64(i + 64)

// scale-d false ignores the old accumulators; both imm-scale are 1.
#define WARPWRIGHT_WGMMA_16BIT(shape, types, regs, a_, b_, p_, ta_, tb_)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p_                                           \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned." shape ".f32." types                               \
               " {" WARPWRIGHT_WGMMA_LIST_##regs "}, %" a_ ", %" b_ ", p, 1, 1, %" ta_ ", %" tb_ \
                                                 ";\n}\n"                                        \
               : WARPWRIGHT_D##regs(0)                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA), "n"(kTransB))
#define WARPWRIGHT_WGMMA_TF32(shape, regs, a_, b_, p_)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p_                            \
               ", 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned." shape                              \
               ".f32.tf32.tf32 {" WARPWRIGHT_WGMMA_LIST_##regs "}, %" a_ ", %" b_ \
                                                               ", p, 1, 1;\n}\n"  \
               : WARPWRIGHT_D##regs(0)                                            \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

// "wgmma.mma_async", m64nNk16 of bf16 and fp16 (kTrans*: 1 = the operand is MN-major) and m64nNk8
// of TF32 (K-major only), N = 2 * kRegs, fp32 accumulators:
//   d[4i + {0, 1}]: row 16 w + g, columns 8i + 2t, 8i + 2t + 1;  d[4i + {2, 3}]: row 16 w + g + 8
// for warp w of the group, g = lane / 4, t = lane % 4.
template <class T, int kTransA, int kTransB, int kRegs>
__device__ __forceinline__ void wgmma(float (&d)[kRegs], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    if constexpr (kRegs == 4) {
      WARPWRIGHT_WGMMA_16BIT("m64n8k16", "bf16.bf16", 4, "4", "5", "6", "7", "8");
    } else if constexpr (kRegs == 32) {
      WARPWRIGHT_WGMMA_16BIT("m64n64k16", "bf16.bf16", 32, "32", "33", "34", "35", "36");
    } else if constexpr (kRegs == 48) {
      WARPWRIGHT_WGMMA_16BIT("m64n96k16", "bf16.bf16", 48, "48", "49", "50", "51", "52");
    } else if constexpr (kRegs == 64) {
      WARPWRIGHT_WGMMA_16BIT("m64n128k16", "bf16.bf16", 64, "64", "65", "66", "67", "68");
    } else if constexpr (kRegs == 96) {
      WARPWRIGHT_WGMMA_16BIT("m64n192k16", "bf16.bf16", 96, "96", "97", "98", "99", "100");
    } else {
      static_assert(kRegs == 128, "N = 8, 64, 96, 128, 192 or 256");
      WARPWRIGHT_WGMMA_16BIT("m64n256k16", "bf16.bf16", 128, "128", "129", "130", "131", "132");
    }
  } else if constexpr (std::is_same_v<T, half>) {
    if constexpr (kRegs == 4) {
      WARPWRIGHT_WGMMA_16BIT("m64n8k16", "f16.f16", 4, "4", "5", "6", "7", "8");
    } else if constexpr (kRegs == 32) {
      WARPWRIGHT_WGMMA_16BIT("m64n64k16", "f16.f16", 32, "32", "33", "34", "35", "36");
    } else if constexpr (kRegs == 48) {
      WARPWRIGHT_WGMMA_16BIT("m64n96k16", "f16.f16", 48, "48", "49", "50", "51", "52");
    } else if constexpr (kRegs == 64) {
      WARPWRIGHT_WGMMA_16BIT("m64n128k16", "f16.f16", 64, "64", "65", "66", "67", "68");
    } else if constexpr (kRegs == 96) {
      WARPWRIGHT_WGMMA_16BIT("m64n192k16", "f16.f16", 96, "96", "97", "98", "99", "100");
    } else {
      static_assert(kRegs == 128, "N = 8, 64, 96, 128, 192 or 256");
      WARPWRIGHT_WGMMA_16BIT("m64n256k16", "f16.f16", 128, "128", "129", "130", "131", "132");
    }
  } else {
    static_assert(std::is_same_v<T, float> && kTransA == 0 && kTransB == 0,
                  "TF32 operands are K-major");
    if constexpr (kRegs == 32) {
      WARPWRIGHT_WGMMA_TF32("m64n64k8", 32, "32", "33", "34");
    } else if constexpr (kRegs == 64) {
      WARPWRIGHT_WGMMA_TF32("m64n128k8", 64, "64", "65", "66");
    } else {
      static_assert(kRegs == 128, "N = 64, 128 or 256");
      WARPWRIGHT_WGMMA_TF32("m64n256k8", 128, "128", "129", "130");
    }
  }
}

// The same, m64n128k8 of TF32 with A from registers. Nothing may touch these before the wait:
//   a[{0, 1}]: rows 16 w + g and 16 w + g + 8, k = t;  a[{2, 3}]: k = t + 4.
__device__ __forceinline__ void wgmma_tf32_registers(float (&d)[64], const uint32_t (&a)[4],
                                                     uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" WARPWRIGHT_WGMMA_LIST_64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
      : WARPWRIGHT_D64(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// The same, m64nNk16 of bf16 and fp16 with A from registers (B MN-major if kTransB). Nothing may
// touch these before the wait (wgmma_pin): a[{0, 1}]: rows 16 w + g and 16 w + g + 8, k = 2t and 2t
// + 1; a[{2, 3}]: k = 2t + 8 and 2t + 9. Two blocks of 8 accumulator columns are one such A.
#define WARPWRIGHT_WGMMA_RS(shape, types, regs, a0, a1, a2, a3, b_, p_, tb_)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p_                                           \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned." shape ".f32." types                               \
               " {" WARPWRIGHT_WGMMA_LIST_##regs "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_ \
                                                 ", p, 1, 1, %" tb_ ";\n}\n"                     \
               : WARPWRIGHT_D##regs(0)                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                             \
                 "r"(static_cast<int>(accumulate)), "n"(kTransB))
template <class T, int kTransB, int kRegs>
__device__ __forceinline__ void wgmma_registers(float (&d)[kRegs], const uint32_t (&a)[4],
                                                uint64_t b, bool accumulate) {
  static_assert(kRegs == 32 || kRegs == 64 || kRegs == 128, "N = 64, 128 or 256");
  if constexpr (std::is_same_v<T, bf16>) {
    if constexpr (kRegs == 32) {
      WARPWRIGHT_WGMMA_RS("m64n64k16", "bf16.bf16", 32, "32", "33", "34", "35", "36", "37", "38");
    } else if constexpr (kRegs == 64) {
      WARPWRIGHT_WGMMA_RS("m64n128k16", "bf16.bf16", 64, "64", "65", "66", "67", "68", "69", "70");
    } else if constexpr (kRegs == 128) {
      WARPWRIGHT_WGMMA_RS("m64n256k16", "bf16.bf16", 128, "128", "129", "130", "131", "132", "133",
                          "134");
    }
  } else {
    static_assert(std::is_same_v<T, half>, "16-bit operands");
    if constexpr (kRegs == 32) {
      WARPWRIGHT_WGMMA_RS("m64n64k16", "f16.f16", 32, "32", "33", "34", "35", "36", "37", "38");
    } else if constexpr (kRegs == 64) {
      WARPWRIGHT_WGMMA_RS("m64n128k16", "f16.f16", 64, "64", "65", "66", "67", "68", "69", "70");
    } else if constexpr (kRegs == 128) {
      WARPWRIGHT_WGMMA_RS("m64n256k16", "f16.f16", 128, "128", "129", "130", "131", "132", "133",
                          "134");
    }
  }
}
#undef WARPWRIGHT_WGMMA_RS

// The first row of a thread among the 64 rows of the accumulators above.
__device__ __forceinline__ int accumulator_warp_row() {
  return static_cast<int>(threadIdx.x % 128 / 32 * 16);
}
__device__ __forceinline__ int accumulator_row() {
  return accumulator_warp_row() + static_cast<int>(threadIdx.x % 32 / 4);
}
__device__ __forceinline__ int accumulator_col() { return static_cast<int>(threadIdx.x % 4 * 2); }

#undef WARPWRIGHT_WGMMA_TF32
#undef WARPWRIGHT_WGMMA_16BIT
#undef WARPWRIGHT_D128
#undef WARPWRIGHT_D96
#undef WARPWRIGHT_D64
#undef WARPWRIGHT_D48
#undef WARPWRIGHT_D32
#undef WARPWRIGHT_D16
#undef WARPWRIGHT_D4
#undef WARPWRIGHT_WGMMA_LIST_128
#undef WARPWRIGHT_WGMMA_LIST_96
#undef WARPWRIGHT_WGMMA_LIST_64
#undef WARPWRIGHT_WGMMA_LIST_48
#undef WARPWRIGHT_WGMMA_LIST_32
#undef WARPWRIGHT_WGMMA_LIST_4

}  // namespace warpwright
