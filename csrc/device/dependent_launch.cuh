// Programmatic dependent launch: a kernel starts before the previous kernel of the stream ends
// (launch_dependent(), sm_90 and later). On other GPUs kernels run one after the other, and these
// functions do nothing.
#pragma once

namespace warpwright {

// In the first kernel: lets the blocks of a dependent next kernel start. Other kernels are not
// affected.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In each block of the second kernel, before it reads data of the first kernel and before it writes
// anything: waits until the first kernel has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a second kernel that is independent of the first: call last, in place of
// wait_for_previous_kernel(). One thread of one block stays until the first kernel has ended,
// because the kernel after them waits for the second only.
__device__ __forceinline__ void outlast_previous_kernel() {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) wait_for_previous_kernel();
}

}  // namespace warpwright
