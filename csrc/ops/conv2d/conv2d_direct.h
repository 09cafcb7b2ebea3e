// Direct convolutions, for the shapes that are bound by memory and not by FLOPs: few input channels
// (group_c * R * S products an output) and depthwise (group_c == 1). Every tensor is read or written
// where it lies; nothing is unfolded. Weight gradients are two launches: partial sums of runs of
// pixels into `workspace`, then their sum in a fixed order.
#pragma once

#include "ops/conv2d/conv2d.h"

namespace warpwright {

// Few input channels, one group: forward and weight (+ bias) gradient.
bool conv2d_few_channels_supported(const Conv2dShape& shape);

// Depthwise with any multiplier k / c: all three directions.
bool conv2d_depthwise_supported(const Conv2dShape& shape);

int64_t conv2d_few_channels_wgrad_workspace_bytes(const Conv2dShape& shape,
                                                  const DeviceInfo& device);
int64_t conv2d_depthwise_wgrad_workspace_bytes(const Conv2dShape& shape, const DeviceInfo& device);
int64_t conv2d_bias_grad_workspace_bytes(const Conv2dShape& shape, const DeviceInfo& device);

#ifdef WARPWRIGHT_WITH_CUDA
// A `workspace` is 16-byte aligned and as long as ..._workspace_bytes(shape, current_device_info());
// the parameters' own workspace pointer is not looked at.
void launch_conv2d_few_channels_fwd(const Conv2dParams& params, cudaStream_t stream);
// Writes grad_weight and, if it is not null, grad_bias.
void launch_conv2d_few_channels_wgrad(const Conv2dBackwardParams& params, void* workspace,
                                      cudaStream_t stream);

void launch_conv2d_depthwise_fwd(const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_depthwise_dgrad(const Conv2dBackwardParams& params, cudaStream_t stream);
// Writes grad_weight and, if it is not null, grad_bias.
void launch_conv2d_depthwise_wgrad(const Conv2dBackwardParams& params, void* workspace,
                                   cudaStream_t stream);

// Sums of grad_output over n, p, q into grad_bias.
void launch_conv2d_bias_grad(const Conv2dBackwardParams& params, void* workspace,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
