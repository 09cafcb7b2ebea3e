// int4 codes and fp16 activations.
#include "ops/linear_quantized/cuda/launch_portable.cuh"

namespace warpwright {

template void launch_fused<half, 4>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                    cudaStream_t);

}  // namespace warpwright
