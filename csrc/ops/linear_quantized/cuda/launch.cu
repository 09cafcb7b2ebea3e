// The one switch from a plan to the instances of the fused kernels.
#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {

template <class T>
static void launch_of_type(const LinearQuantizedParams& p, const LinearQuantizedPlan& plan,
                           void* workspace, cudaStream_t stream) {
  for_int<4, 8>(p.weight.bits, [&]<int kBits>() {
    if (plan.tiled) {
      return plan.gradient ? launch_tiled<T, kBits, true>(p, plan, workspace, stream)
                           : launch_tiled<T, kBits, false>(p, plan, workspace, stream);
    }
    plan.ranks == 1 ? launch_fused<T, kBits>(p, plan, stream)
                    : launch_fused_sm90<T, kBits>(p, plan, stream);
  });
}

void launch_linear_quantized(const LinearQuantizedParams& p, const LinearQuantizedPlan& plan,
                             void* workspace, cudaStream_t stream) {
  p.dtype == DType::kBFloat16 ? launch_of_type<bf16>(p, plan, workspace, stream)
                              : launch_of_type<half>(p, plan, workspace, stream);
}

}  // namespace warpwright
