// Turns among blocks that run together: a block waits until a counter in global memory has its
// number, works, and adds one.
#pragma once

namespace warpwright {

// "ld.acquire.gpu". What the threads wrote before their pass_turn() is visible afterwards.
__device__ __forceinline__ void wait_for_turn(const int* counter, int turn) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
  } while (value != turn);
}

// "red.release.gpu", .add.
__device__ __forceinline__ void pass_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(__cvta_generic_to_global(counter))
               : "memory");
}

}  // namespace warpwright
