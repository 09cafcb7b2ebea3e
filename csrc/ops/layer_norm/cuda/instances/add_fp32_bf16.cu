// Addition and norm, float32 next to bfloat16.
#include "ops/layer_norm/cuda/add.cuh"

namespace warpwright {

template void launch_add_typed<float, bf16>(const LayerNormParams&, const LayerNormPlan&,
                                            cudaStream_t);
template void launch_add_backward_typed<float, bf16>(const LayerNormBackwardParams&,
                                                     const LayerNormBackwardPlan&, void*,
                                                     cudaStream_t);

}  // namespace warpwright
