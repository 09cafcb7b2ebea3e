// int8 codes and fp16 activations, in clusters.
#include "ops/linear_quantized/cuda/launch_sm90.cuh"

namespace warpwright {

template void launch_fused_sm90<half, 8>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                         cudaStream_t);

}  // namespace warpwright
