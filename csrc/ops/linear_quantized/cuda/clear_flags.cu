// Zeros, for the flags of tiles that CTAs share (tiled_sm90.cuh). One block. A kernel instead of a
// memset, because the next kernel can start before it ends.
#include "device/dependent_launch.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {

static __global__ void clear_flags_kernel(uint4* flags) {
  let_next_kernel_start();
  wait_for_previous_kernel();  // which may use this memory
  flags[threadIdx.x] = uint4{};
}

void clear_flags(void* flags, cudaStream_t stream) {
  launch_dependent(clear_flags_kernel, 1, kTiledFlagBytes / 16, 0, stream,
                   static_cast<uint4*>(flags));
}

}  // namespace warpwright
