// The launch of the kernel of tiles.
#pragma once

#include "host/launch_cluster.h"
#include "host/tensor_map_bytes.h"
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
  p.passes = static_cast<int>(plan.passes);
  const QuantizedWeight& w = call.weight;
  const int64_t unit_bytes = tiled_block_bytes(kBits),
                row_bytes = w.features / kTiledK * unit_bytes;
  p.codes = make_bytes_tensor_map({w.codes, row_bytes, w.outputs / kFragmentFeatures, row_bytes,
                                   kGradient ? 2048 : static_cast<int>(unit_bytes),
                                   kGradient ? 4 : kTiledBlocks});
  p.scale_rows = tiled_scale_rows(w, kGradient);
  if (p.scale_rows != 0) {
    const int64_t groups = w.features / w.group;
    const int features = kGradient ? static_cast<int>(kTiledK) : kTiledColumns;
    p.scales = make_bytes_tensor_map(
        {w.scales, w.outputs * 2, groups, w.scale_strides[1] * 2, features * 2, p.scale_rows});
    if (w.zeros != nullptr) {
      p.zeros = make_bytes_tensor_map(
          {w.zeros, w.outputs, groups, w.zero_strides[1], features, p.scale_rows});
    }
  }
  p.rows_per_unit = w.group < kTiledK ? 2 : 1;
  p.group_divisor = group_divisor(w.group / kTiledK);
  auto run = [&]<bool kZeros>() {
    for_int<32, 64, 128>(plan.tiles * 8, [&]<int kTokens>() {
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
