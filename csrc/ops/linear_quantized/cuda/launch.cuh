// The launch of the fused kernel for one type of x and one width of codes.
#pragma once

#include "ops/linear_quantized/cuda/fused.cuh"

namespace warpwright {

template <class T, int kBits>
void launch_fused(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                  cudaStream_t stream) {
  const QuantizedWeight& w = call.weight;
  FusedParams p{};
  p.call = call;
  p.stage = quantized_stage(w, plan.blocks, plan.tiles);
  p.blocks = plan.blocks;
  p.depth = plan.depth;
  p.scale_rows = scale_rows_per_stage(w);
  const int64_t per_group = w.group / fragment_k(w.bits);
  p.group_divisor =
      per_group > 1 ? static_cast<uint32_t>(((int64_t{1} << 32) + per_group - 1) / per_group) : 0;
  p.ranks = plan.ranks;
  const dim3 grid(static_cast<unsigned>(plan.ctas * plan.passes));
  for_int<1, 2>(plan.tiles, [&]<int kTiles>() {
    auto run = [&]<class S, bool kZeros>() {
      launch_overlapping(true, linear_quantized_kernel<T, S, kBits, kTiles, kZeros>, grid,
                         dim3(kQuantizedThreads), plan.ranks, quantized_smem_bytes(w, plan), stream,
                         p);
    };
    if constexpr (kBits == 8) {
      run.template operator()<T, false>();
    } else {
      for_bool(w.zeros != nullptr, [&]<bool kZeros>() {
        if (w.scale_dtype == DType::kFloat32) {
          run.template operator()<float, kZeros>();
        } else {
          run.template operator()<T, kZeros>();
        }
      });
    }
  });
}

// instances/: a type and a width per file.
extern template void launch_fused<bf16, 4>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                           cudaStream_t);
extern template void launch_fused<half, 4>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                           cudaStream_t);
extern template void launch_fused<bf16, 8>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                           cudaStream_t);
extern template void launch_fused<half, 8>(const LinearQuantizedParams&, const LinearQuantizedPlan&,
                                           cudaStream_t);

}  // namespace warpwright
