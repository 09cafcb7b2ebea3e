// Addition and norm, float32 next to float16.
#include "ops/layer_norm/cuda/add.cuh"

namespace warpwright {

template void launch_add_typed<float, half>(const LayerNormParams&, const LayerNormPlan&,
                                            cudaStream_t);
template void launch_add_backward_typed<float, half>(const LayerNormBackwardParams&,
                                                     const LayerNormBackwardPlan&, void*,
                                                     cudaStream_t);

}  // namespace warpwright
