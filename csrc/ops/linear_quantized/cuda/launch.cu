// The one switch from a plan to the fused kernel's instances.
#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {

void launch_linear_quantized(const LinearQuantizedParams& p, const LinearQuantizedPlan& plan,
                             cudaStream_t stream) {
  const bool is_bf16 = p.dtype == DType::kBFloat16;
  if (p.weight.bits == 4) {
    is_bf16 ? launch_fused<bf16, 4>(p, plan, stream) : launch_fused<half, 4>(p, plan, stream);
  } else {
    is_bf16 ? launch_fused<bf16, 8>(p, plan, stream) : launch_fused<half, 8>(p, plan, stream);
  }
}

}  // namespace warpwright
