// The launch of the fused kernel without clusters.
#pragma once

#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {

template <class T, int kBits>
void launch_fused(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                  cudaStream_t stream) {
  for_fused<T, kBits>(call, plan, [&]<class S, int kTiles, bool kZeros>() {
    launch_dependent(linear_quantized_kernel<T, S, kBits, kTiles, kZeros>,
                     dim3(static_cast<unsigned>(plan.ctas * plan.passes)), dim3(kQuantizedThreads),
                     quantized_smem_bytes(call.weight, plan), stream, fused_params(call, plan));
  });
}

}  // namespace warpwright
