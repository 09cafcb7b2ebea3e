// int4 codes and bf16 activations, in tiles: the gradient.
#include "ops/linear_quantized/cuda/launch_tiled.cuh"

namespace warpwright {

template void launch_tiled<bf16, 4, true>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                          void*, cudaStream_t);

}  // namespace warpwright
