// A kernel that starts before the one before it in the stream ends (launch_dependent(); sm_90 and
// later, elsewhere one follows the other whole and these do nothing).
#pragma once

namespace warpwright {

// In the first kernel, if the next is launched so (others need not wait): its blocks start early.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In the second, in each block, before anything that the first has written is read and before
// anything is written: waits until the first is over and its writes can be seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// In its place in a second kernel that has nothing to do with the first, and runs beside it, at the
// end: a thread of one block stays until the first is over, for whoever comes next waits for the
// second alone.
__device__ __forceinline__ void outlast_previous_kernel() {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) wait_for_previous_kernel();
}

}  // namespace warpwright
