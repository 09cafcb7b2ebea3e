// int4 codes and bf16 activations.
#include "ops/linear_quantized/cuda/launch_portable.cuh"

namespace warpwright {

template void launch_fused<bf16, 4>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                    cudaStream_t);

}  // namespace warpwright
