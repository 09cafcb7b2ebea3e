// The input gradients that gate and sum for the batch norm before them, bfloat16.
#include "ops/conv2d_batch_norm/cuda/gated_product.cuh"

namespace warpwright {

template void launch_gated_product<bf16>(const GatedDgradParams&, const GatedDgradPlan&, void*,
                                         cudaStream_t);

}  // namespace warpwright
