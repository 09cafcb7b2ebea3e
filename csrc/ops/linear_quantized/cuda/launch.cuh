// The launches of the fused kernel for one type of x and one width of codes.
#pragma once

#include "ops/linear_quantized/cuda/fused.cuh"

namespace warpwright {

// __umulhi(i, group_divisor(per_group)) is i / per_group if i * per_group is below 2^32
// (why_not_fused). 0: a group has one stage at most.
inline uint32_t group_divisor(int64_t per_group) {
  return per_group > 1 ? static_cast<uint32_t>(((int64_t{1} << 32) + per_group - 1) / per_group)
                       : 0;
}

inline FusedParams fused_params(const LinearQuantizedParams& call,
                                const LinearQuantizedPlan& plan) {
  const QuantizedWeight& w = call.weight;
  FusedParams p{};
  p.call = call;
  p.stage = quantized_stage(w, plan.blocks, plan.tiles);
  p.blocks = plan.blocks;
  p.depth = plan.depth;
  p.ranks = plan.ranks;
  p.early = plan.early;
  p.scale_rows = scale_rows_per_stage(w);
  p.group_divisor = group_divisor(w.group / fragment_k(w.bits));
  return p;
}

// Calls f<S, kTiles, kZeros>() with the plan's instance; S is the scales' type.
template <class T, int kBits, class F>
void for_fused(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan, F&& f) {
  for_int<1, 2>(plan.tiles, [&]<int kTiles>() {
    if constexpr (kBits == 8) {
      f.template operator()<T, kTiles, false>();
    } else {
      for_bool(call.weight.zeros != nullptr, [&]<bool kZeros>() {
        if (call.weight.scale_dtype == DType::kFloat32) {
          f.template operator()<float, kTiles, kZeros>();
        } else {
          f.template operator()<T, kTiles, kZeros>();
        }
      });
    }
  });
}

// instances/: a type and a width per file.
template <class T, int kBits>
void launch_fused(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                  cudaStream_t stream);
// The same in clusters.
template <class T, int kBits>
void launch_fused_sm90(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                       cudaStream_t stream);
// In tiles: y, or the gradient of x.
template <class T, int kBits, bool kGradient>
void launch_tiled(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                  void* workspace, cudaStream_t stream);
void clear_flags(void* flags, cudaStream_t stream);

}  // namespace warpwright
