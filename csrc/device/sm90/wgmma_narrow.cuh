// "wgmma.mma_async", m64n32k16 of bf16 and fp16 with A from registers: wgmma.cuh's order of a
// batch, and its layouts of A and of the accumulators.
#pragma once

#include "device/sm90/wgmma.cuh"

namespace warpwright {

#define WARPWRIGHT_WGMMA_N32(types)                                                             \
  asm volatile(                                                                                 \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                              \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." types                                       \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "               \
      "{%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}\n"                                           \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),  \
        "n"(kTransB))

template <class T, int kTransB>
__device__ __forceinline__ void wgmma_registers(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                                bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    WARPWRIGHT_WGMMA_N32("bf16.bf16");
  } else {
    static_assert(std::is_same_v<T, half>, "16-bit operands");
    WARPWRIGHT_WGMMA_N32("f16.f16");
  }
}
#undef WARPWRIGHT_WGMMA_N32

}  // namespace warpwright
