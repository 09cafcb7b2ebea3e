// Addition and norm, float32 throughout.
#include "ops/layer_norm/cuda/add.cuh"

namespace warpwright {

template void launch_add_typed<float, float>(const LayerNormParams&, const LayerNormPlan&,
                                             cudaStream_t);
template void launch_add_backward_typed<float, float>(const LayerNormBackwardParams&,
                                                      const LayerNormBackwardPlan&, void*,
                                                      cudaStream_t);

}  // namespace warpwright
