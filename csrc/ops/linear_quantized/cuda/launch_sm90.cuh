// The launch of the fused kernel in clusters.
#pragma once

#include "host/launch_cluster.h"
#include "ops/linear_quantized/cuda/fused_sm90.cuh"
#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {

template <class T, int kBits>
void launch_fused_sm90(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                       cudaStream_t stream) {
  for_fused<T, kBits>(call, plan, [&]<class S, int kTiles, bool kZeros>() {
    launch_overlapping(true, linear_quantized_sm90_kernel<T, S, kBits, kTiles, kZeros>,
                       dim3(static_cast<unsigned>(plan.ctas * plan.passes)),
                       dim3(kQuantizedThreads), plan.ranks, quantized_smem_bytes(call.weight, plan),
                       stream, fused_params(call, plan));
  });
}

}  // namespace warpwright
