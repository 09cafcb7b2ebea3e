// int8 codes and fp16 activations, in tiles.
#include "ops/linear_quantized/cuda/launch_tiled.cuh"

namespace warpwright {

template void launch_tiled<half, 8, false>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                           void*, cudaStream_t);

}  // namespace warpwright
