// Launching a kernel while the one before it ends, with dynamic shared memory.
#pragma once

#include "host/launch.h"

namespace warpwright {

#ifdef __CUDACC__
// As launch_dependent() of host/launch.h.
template <class... Params, class... Args>
void launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t smem_bytes,
                      cudaStream_t stream, Args&&... args) {
  if (current_device_info().sm_arch < 90) {
    return launch(kernel, grid, block, smem_bytes, stream, args...);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  launch_with(attribute, kernel, grid, block, smem_bytes, stream, args...);
}
#endif

}  // namespace warpwright
