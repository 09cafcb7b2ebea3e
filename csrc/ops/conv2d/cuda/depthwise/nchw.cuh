// Depthwise 3 x 3 in NCHW: kernels of their own, called by depthwise.cu and the direct weight
// gradient.
#pragma once

#include "ops/conv2d/cuda/direct/direct.cuh"

namespace warpwright {

bool conv2d_depthwise_nchw_fprop_supported(const Conv2dShape& shape);
void launch_conv2d_depthwise_nchw_fprop(const Conv2dShape& shape, bool flip, const void* x,
                                        const void* w, const void* bias, void* y,
                                        cudaStream_t stream);

// Leaves `parts` partial sums (9 taps and the bias, K), to be added in order.
bool conv2d_depthwise_nchw_wgrad_supported(const Conv2dShape& shape);
int conv2d_depthwise_nchw_wgrad_parts(const Conv2dShape& shape, const DeviceInfo& device);
void launch_conv2d_depthwise_nchw_wgrad(const Conv2dBackwardParams& params, int parts,
                                        void* partials, cudaStream_t stream);

}  // namespace warpwright
