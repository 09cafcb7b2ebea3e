#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {

template void launch_fused<half, 8>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                    cudaStream_t);

}  // namespace warpwright
