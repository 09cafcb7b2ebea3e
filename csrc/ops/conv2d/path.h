// Which family of kernels a convolution takes on the GPU.
#pragma once

#include "ops/conv2d/cuda/few_channels/dgrad.h"
#include "ops/conv2d/cuda/few_channels/fprop.h"
#include "ops/conv2d/cuda/few_channels/wgrad.h"

namespace warpwright {

enum class Conv2dPath { kFewChannels, kDepthwise, kImplicitGemm };

// `addresses`: the operands' addresses or-ed together.
inline Conv2dPath choose_conv2d_path(ConvDirection direction, const Conv2dShape& s,
                                     uintptr_t addresses, const DeviceInfo& device) {
  // One input channel is both; few-channel kernels read it once for a run of outputs.
  const bool few = direction == ConvDirection::kForward ? conv2d_few_channels_supported(s)
                   : direction == ConvDirection::kWeightGradient
                       ? conv2d_few_channels_wgrad_supported(s) ||
                             choose_few_channels_wgrad_config(s, addresses, device).supported
                       : choose_few_channels_dgrad_config(s, addresses, device).supported;
  if (few) return Conv2dPath::kFewChannels;
  return conv2d_depthwise_supported(s) ? Conv2dPath::kDepthwise : Conv2dPath::kImplicitGemm;
}

inline std::string describe_conv2d(ConvDirection direction, const Conv2dShape& s,
                                   uintptr_t addresses, const DeviceInfo& device) {
  switch (choose_conv2d_path(direction, s, addresses, device)) {
    case Conv2dPath::kFewChannels:
      if (direction == ConvDirection::kInputGradient) {
        return describe(choose_few_channels_dgrad_config(s, addresses, device));
      }
      if (direction == ConvDirection::kWeightGradient) {
        const FewChannelsWgradConfig config =
            choose_few_channels_wgrad_config(s, addresses, device);
        if (config.supported) return describe(config);
      }
      if (direction == ConvDirection::kForward) {
        const FewChannelsFpropConfig config =
            choose_few_channels_fprop_config(s, addresses, device);
        if (config.supported) return describe(config);
      }
      return "portable few-channel kernel, FMA: " + std::to_string(s.c * s.taps()) +
             " products an output, nothing is unfolded";
    case Conv2dPath::kDepthwise:
      return "portable depthwise kernel, FMA: one input channel an output";
    default:
      return describe(choose_conv2d_config(direction, s, addresses, device));
  }
}

}  // namespace warpwright
