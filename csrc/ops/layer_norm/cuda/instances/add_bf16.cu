// Addition and norm, bfloat16 throughout.
#include "ops/layer_norm/cuda/add.cuh"

namespace warpwright {

template void launch_add_typed<bf16, bf16>(const LayerNormParams&, const LayerNormPlan&,
                                           cudaStream_t);
template void launch_add_backward_typed<bf16, bf16>(const LayerNormBackwardParams&,
                                                    const LayerNormBackwardPlan&, void*,
                                                    cudaStream_t);

}  // namespace warpwright
