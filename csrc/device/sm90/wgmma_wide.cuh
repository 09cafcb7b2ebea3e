// wgmma of 96 and 192 columns, as far as wgmma.cuh does not have them. Its order of a batch and its
// layouts hold. All add to the accumulators.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/types.cuh"

namespace warpwright {

#define WARPWRIGHT_WIDE_48                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WARPWRIGHT_WIDE_96                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, " \
  "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WARPWRIGHT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WARPWRIGHT_D16(i) \
  WARPWRIGHT_D4(i), WARPWRIGHT_D4(i + 4), WARPWRIGHT_D4(i + 8), WARPWRIGHT_D4(i + 12)
#define WARPWRIGHT_D48(i) WARPWRIGHT_D16(i), WARPWRIGHT_D16(i + 16), WARPWRIGHT_D16(i + 32)
#define WARPWRIGHT_D96(i) WARPWRIGHT_D48(i), WARPWRIGHT_D48(i + 48)

// "wgmma.mma_async", m64n96k8 and m64n192k8 of TF32, both operands in shared memory.
__device__ __forceinline__ void wgmma_tf32(float (&d)[48], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k8.f32.tf32.tf32 {" WARPWRIGHT_WIDE_48
      "}, %48, %49, p, 1, 1;\n}\n"
      : WARPWRIGHT_D48(0)
      : "l"(a), "l"(b), "r"(1));
}
__device__ __forceinline__ void wgmma_tf32(float (&d)[96], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k8.f32.tf32.tf32 {" WARPWRIGHT_WIDE_96
      "}, %96, %97, p, 1, 1;\n}\n"
      : WARPWRIGHT_D96(0)
      : "l"(a), "l"(b), "r"(1));
}

#define WARPWRIGHT_WIDE_RS(shape, types, trans_b)                                 \
  asm volatile(                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"                               \
      "wgmma.mma_async.sync.aligned." shape ".f32." types " {" WARPWRIGHT_WIDE_96 \
      "}, {%96, %97, %98, %99}, %100, p, 1, 1" trans_b ";\n}\n"                   \
      : WARPWRIGHT_D96(0)                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))

// "wgmma.mma_async", m64n192k8 of TF32 and m64n192k16 of bf16 and fp16, with A from registers. B is
// K-major in TF32, else MN-major.
template <class T>
__device__ __forceinline__ void wgmma_registers(float (&d)[96], const uint32_t (&a)[4],
                                                uint64_t b) {
  if constexpr (std::is_same_v<T, float>) {
    WARPWRIGHT_WIDE_RS("m64n192k8", "tf32.tf32", "");
  } else if constexpr (std::is_same_v<T, bf16>) {
    WARPWRIGHT_WIDE_RS("m64n192k16", "bf16.bf16", ", 1");
  } else {
    static_assert(std::is_same_v<T, half>);
    WARPWRIGHT_WIDE_RS("m64n192k16", "f16.f16", ", 1");
  }
}

#undef WARPWRIGHT_WIDE_RS
#undef WARPWRIGHT_D96
#undef WARPWRIGHT_D48
#undef WARPWRIGHT_D16
#undef WARPWRIGHT_D4
#undef WARPWRIGHT_WIDE_96
#undef WARPWRIGHT_WIDE_48

}  // namespace warpwright
