// A kernel that starts before the previous one in the stream ends (launch_dependent(); sm_90 and
// later. On older GPUs one follows the other and these functions do nothing).
#pragma once

namespace warpwright {

// In the first kernel, if the next is launched by launch_dependent(): its blocks may start early.
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

// For a second kernel independent of the first: call last, in place of wait_for_previous_kernel().
// One thread stays until the first kernel is over, because a third kernel waits for the second
// alone.
__device__ __forceinline__ void outlast_previous_kernel() {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) wait_for_previous_kernel();
}

}  // namespace warpwright
