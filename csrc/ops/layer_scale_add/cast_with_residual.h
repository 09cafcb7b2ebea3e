// The gradient of a float32 tensor that a cast to 16 bits and another op read: the sum of both
// gradients. Bound by memory: 10 bytes per element. A cast back and an addition move 18.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct WidenAndAddParams {
  DType dtype;  // of `narrow`: bfloat16 or float16
  int64_t numel;
  const void* narrow;  // (numel), any dense order
  const void* wide;    // (numel), float32, same order
  void* sum;           // (numel), float32, same order
};

#ifdef WARPWRIGHT_WITH_CUDA
void launch_widen_and_add(const WidenAndAddParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
