// Addition and norm, float16 throughout.
#include "ops/layer_norm/cuda/add.cuh"

namespace warpwright {

template void launch_add_typed<half, half>(const LayerNormParams&, const LayerNormPlan&,
                                           cudaStream_t);
template void launch_add_backward_typed<half, half>(const LayerNormBackwardParams&,
                                                    const LayerNormBackwardPlan&, void*,
                                                    cudaStream_t);

}  // namespace warpwright
