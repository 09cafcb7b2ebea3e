// The launcher of the walks, instantiated in instances/, one element type per file.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d/cuda/row_walk/row_walk.h"
#include "ops/conv2d/cuda/row_walk/wgrad.h"

namespace warpwright {

// fprop, or dgrad without bias. T: bf16, half, or float for TF32. `pixels` is the NHWC image of
// windows: x, or dy. dgrad in TF32 has the weights (C, RS, K).
template <class T>
void launch_row_walk(const Conv2dShape& shape, const RowWalkConfig& config, const void* pixels,
                     const void* weight, const void* bias, void* d, cudaStream_t stream);

// Writes the CTAs' sums; launch_direct_wgrad_sum() adds them.
template <class T>
void launch_row_walk_wgrad(const Conv2dBackwardParams& params, const RowWalkWgradConfig& config,
                           void* workspace, cudaStream_t stream);

}  // namespace warpwright
