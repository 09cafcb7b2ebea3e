// wgmma of TF32 with A from registers and 64 columns. wgmma.cuh has the forms with more columns,
// and the order of a batch.
#pragma once

#include <cstdint>

namespace warpwright {

// "wgmma.mma_async", m64n64k8. Nothing may touch `a` before the wait:
//   a[{0, 1}]: rows 16 w + g and 16 w + g + 8, k = t;  a[{2, 3}]: k = t + 4.
__device__ __forceinline__ void wgmma_tf32_registers(float (&d)[32], const uint32_t (&a)[4],
                                                     uint64_t b, bool accumulate) {
#define WARPWRIGHT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
      : WARPWRIGHT_D4(0), WARPWRIGHT_D4(4), WARPWRIGHT_D4(8), WARPWRIGHT_D4(12), WARPWRIGHT_D4(16),
        WARPWRIGHT_D4(20), WARPWRIGHT_D4(24), WARPWRIGHT_D4(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
#undef WARPWRIGHT_D4
}

}  // namespace warpwright
