// The launchers of the sm_90a convolution, instantiated in instances/, one element type per file,
// so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d/cuda/sm90/config.h"
#include "ops/conv2d/cuda/sm90/join.h"
#include "ops/conv2d/cuda/sm90/plane_product.h"

namespace warpwright {

// T: bf16, half, or float for TF32. dgrad in TF32 has the weights (C, RS, K).
template <class T>
void launch_tma_im2col_fprop(const Conv2dParams& params, const TmaIm2colConfig& config,
                             cudaStream_t stream);
template <class T>
void launch_tma_im2col_dgrad(const Conv2dBackwardParams& params, const TmaIm2colConfig& config,
                             cudaStream_t stream);
template <class T>
void launch_tma_im2col_wgrad(const Conv2dBackwardParams& params, const TmaIm2colConfig& config,
                             void* workspace, cudaStream_t stream);

// dgrad, plus Conv2dBackwardParams::addend.
template <class T>
void launch_joined_dgrad(const Conv2dBackwardParams& params, const JoinedDgradConfig& config,
                         cudaStream_t stream);

// fprop, or dgrad of stride 1, whose D is stored in planes (TmaIm2colConfig::stores_planes).
// `pixels` is the NHWC image of windows: x, or dy.
template <class T>
void launch_tma_im2col_planes(const Conv2dShape& shape, const TmaIm2colConfig& config,
                              const void* pixels, const void* weight, const void* bias, void* d,
                              cudaStream_t stream);

// A 1 x 1 convolution in NCHW: `planes` and `d` are x and y, or dy and dx. dgrad in TF32 has the
// weight (C, K).
template <class T>
void launch_plane_product(const Conv2dShape& shape, const PlaneProductConfig& config,
                          const void* planes, const void* weight, const void* bias, void* d,
                          cudaStream_t stream);
template <class T>
void launch_plane_product_wgrad(const Conv2dBackwardParams& params,
                                const PlaneProductConfig& config, void* workspace,
                                cudaStream_t stream);

}  // namespace warpwright
