// The launch of the kernel of tiles.
#pragma once

#include "host/launch_cluster.h"
#include "ops/linear_quantized/cuda/launch.cuh"
#include "ops/linear_quantized/cuda/tiled_sm90.cuh"

namespace warpwright {

template <class T, int kBits, bool kGradient>
void launch_tiled(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                  const void* tokens, cudaStream_t stream) {
  TiledParams p{};
  p.call = call;
  p.stage = tiled_stage(call.weight, plan);
  p.tokens = static_cast<const char*>(tokens);
  p.depth = plan.depth;
  p.ranks = plan.ranks;
  p.scale_rows = tiled_scale_rows(call.weight, kGradient);
  auto run = [&]<bool kZeros>() {
    for_int<64, 128, 256>(plan.tiles * 8, [&]<int kTokens>() {
      launch_overlapping(true, linear_quantized_tiled_kernel<T, kBits, kGradient, kZeros, kTokens>,
                         dim3(static_cast<unsigned>(plan.ctas)), dim3(kTiledThreads), plan.ranks,
                         tiled_smem_bytes(call.weight, plan), stream, p);
    });
  };
  if constexpr (kBits == 8) {
    run.template operator()<false>();
  } else {
    for_bool(call.weight.zeros != nullptr, run);
  }
}

}  // namespace warpwright
