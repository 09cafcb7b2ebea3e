// Numbers that blocks take in turn.
#pragma once

namespace warpwright {

// "atom", .add: the next number of `counter` in global memory. Which block gets which number
// differs from run to run, so no result may depend on it.
__device__ __forceinline__ int take_ticket(int* counter) {
  int ticket;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;\n"
               : "=r"(ticket)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return ticket;
}

}  // namespace warpwright
