// Launching a kernel whose blocks wait for each other (device/grid_barrier.cuh).
#pragma once

#include "host/launch.h"

namespace warpwright {

#ifdef __CUDACC__
// Like launch(), with all blocks resident together. Returns false and launches nothing if they do
// not fit the context's share of the GPU.
template <class... Params, class... Args>
bool launch_cooperative(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t smem_bytes,
                        cudaStream_t stream, Args&&... args) {
  allow_shared_memory(kernel, smem_bytes);
  cudaLaunchAttribute attributes[1] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  const cudaLaunchConfig_t config = launch_config(grid, block, smem_bytes, stream, attributes);
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (status == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();
    return false;
  }
  cuda_check(status, "kernel launch");
  return true;
}
#endif

}  // namespace warpwright
