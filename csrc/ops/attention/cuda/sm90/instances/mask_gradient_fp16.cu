// Instances: fp16, the gradient of a float mask.
#include "ops/attention/cuda/sm90/mask_gradient.cuh"

namespace warpwright {

template void launch_attention_mask_gradient_sm90<half>(const AttentionBackwardParams&,
                                                        const MaskGradientPlan&,
                                                        const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
