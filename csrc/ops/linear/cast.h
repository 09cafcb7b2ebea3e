// cast(x): float32 to a 16-bit type, for the products under autocast. Bound by memory: 6 bytes per
// element.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct CastParams {
  DType dtype;  // of the output: bfloat16 or float16
  int64_t numel;
  const void* input;  // (numel), float32, any dense order
  void* output;       // (numel), same order
};

#ifdef WARPWRIGHT_WITH_CUDA
void launch_cast(const CastParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
