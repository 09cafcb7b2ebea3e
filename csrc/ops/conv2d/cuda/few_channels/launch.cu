// Few input channels: the direct kernels with one run of products an input element. Stem and MNIST
// first layers: forward bound by the output's bytes up to about 20 products an output.
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/few_channels/fprop.h"
#include "ops/conv2d/cuda/few_channels/wgrad.h"

namespace warpwright {

int64_t conv2d_few_channels_wgrad_workspace_bytes(const Conv2dShape& shape,
                                                  const DeviceInfo& device) {
  const FewChannelsWgradConfig config = choose_few_channels_wgrad_config(shape, 0, device);
  return config.supported ? few_channels_wgrad_workspace_bytes(shape, config)
                          : conv2d_direct_wgrad_workspace_bytes(shape, false, device);
}

void launch_conv2d_few_channels_fwd(const Conv2dParams& p, cudaStream_t stream) {
  const FewChannelsFpropConfig config =
      choose_few_channels_fprop_config(p.shape, address_of(p.output), current_device_info());
  if (config.supported) return launch_conv2d_few_channels_fprop(p, config, stream);
  launch_conv2d_direct_fprop(p.shape.dtype, DirectShape(p.shape, kRunQ), false, false, p.input,
                             p.weight, p.bias, p.output, stream);
}

void launch_conv2d_few_channels_wgrad(const Conv2dBackwardParams& p, void* workspace,
                                      cudaStream_t stream) {
  const FewChannelsWgradConfig config =
      choose_few_channels_wgrad_config(p.shape, address_of(p.grad_output), current_device_info());
  if (!config.supported) return launch_conv2d_direct_wgrad(p, false, workspace, stream);
  launch_conv2d_few_channels_wgrad_parts(p, config, workspace, stream);
  launch_conv2d_direct_wgrad_sum(p, DirectShape(p.shape, kRunQ), config.parts, config.pitch_k(),
                                 workspace, stream);
}

}  // namespace warpwright
