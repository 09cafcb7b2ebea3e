// The launchers of the sm_90a convolution, instantiated in instances/, one element type per file,
// so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d/cuda/sm90/config.h"

namespace warpwright {

// T: bf16 or half.
template <class T>
void launch_tma_im2col_fprop(const Conv2dParams& params, const TmaIm2colConfig& config,
                             cudaStream_t stream);
template <class T>
void launch_tma_im2col_dgrad(const Conv2dBackwardParams& params, const TmaIm2colConfig& config,
                             cudaStream_t stream);
template <class T>
void launch_tma_im2col_wgrad(const Conv2dBackwardParams& params, const TmaIm2colConfig& config,
                             void* workspace, cudaStream_t stream);

}  // namespace warpwright
