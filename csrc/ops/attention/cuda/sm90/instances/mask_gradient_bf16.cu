// Instances: bf16, the gradient of a float mask.
#include "ops/attention/cuda/sm90/mask_gradient.cuh"

namespace warpwright {

template void launch_attention_mask_gradient_sm90<bf16>(const AttentionBackwardParams&,
                                                        const MaskGradientPlan&,
                                                        const AttentionWorkspace&, cudaStream_t);

}  // namespace warpwright
