// The launch of the kernel of tiles.
#pragma once

#include "host/launch_cluster.h"
#include "host/tensor_map.h"
#include "host/tensor_map_bytes.h"
#include "ops/linear_quantized/cuda/launch.cuh"
#include "ops/linear_quantized/cuda/tiled_sm90.cuh"

namespace warpwright {

// The boxes of a stage and of the output.
template <int kBits, bool kGradient, int kGroups>
void make_tiled_maps(TiledParams& p, int tokens) {
  using Cta = TiledCta<kBits, kGradient, kGroups>;
  const LinearQuantizedParams& call = p.call;
  const QuantizedWeight& w = call.weight;
  const int64_t row_bytes = w.features / kTiledK * Cta::kBlockBytes;
  p.codes = make_bytes_tensor_map({w.codes, row_bytes, w.outputs / kFragmentFeatures, row_bytes,
                                   kGradient ? Cta::kBoxBytes : Cta::kBlockBytes,
                                   kGradient ? 4 : Cta::kBlocks});
  if (p.scale_rows != 0) {
    const int64_t groups = w.features / w.group;
    const int features = kGradient ? static_cast<int>(kTiledK) : Cta::kColumns;
    p.scales = make_bytes_tensor_map(
        {w.scales, w.outputs * 2, groups, w.scale_strides[1] * 2, features * 2, p.scale_rows});
    if (w.zeros != nullptr) {
      p.zeros = make_bytes_tensor_map(
          {w.zeros, w.outputs, groups, w.zero_strides[1], features, p.scale_rows});
    }
  }
  const int64_t sum = kGradient ? w.outputs : w.features;
  const int64_t columns = kGradient ? w.features : w.outputs;
  p.box_tokens = static_cast<int>(
      std::min({int64_t{tokens}, int64_t{64}, ceil_div(call.rows, int64_t{8}) * 8}));
  p.tokens = make_tensor_map(
      {call.dtype, false, call.input, sum, call.rows, call.input_pitch, 64, p.box_tokens});
  p.output = make_tensor_map(
      {call.dtype, false, call.output, columns, call.rows, columns, 64, p.ranks > 1 ? 16 : tokens});
}

template <int kGroups>
TiledParams tiled_params(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                         void* workspace) {
  const QuantizedWeight& w = call.weight;
  TiledParams p{};
  p.call = call;
  p.memory = tiled_memory(w, plan);
  p.depth = plan.depth;
  p.ranks = plan.ranks;
  p.token_tiles = static_cast<int>(plan.passes);
  p.column_tiles =
      static_cast<int>(ceil_div(plan.gradient ? w.features : w.outputs, int64_t{kGroups * 64}));
  p.units = static_cast<int>(ceil_div(plan.gradient ? w.outputs : w.features, kTiledK));
  p.rounds = plan.rounds;
  const int ctas = static_cast<int>(plan.ctas);
  if (plan.ranks > 1) {
    p.each = p.units / plan.ranks;
    p.extra = p.units % plan.ranks;
  } else if (plan.shared) {
    const int units = (p.token_tiles * p.column_tiles - p.rounds * ctas) * p.units;
    p.each = units / ctas;
    p.extra = units % ctas;
    p.flags = static_cast<int*>(workspace);
    p.parts = reinterpret_cast<float*>(static_cast<char*>(workspace) + kTiledFlagBytes);
  }
  p.scale_rows = tiled_scale_rows(w, plan.gradient, kGroups * 64);
  p.rows_per_unit = w.group < kTiledK ? 2 : 1;
  p.group_divisor = group_divisor(w.group / kTiledK);
  return p;
}

template <class T, int kBits, bool kGradient>
void launch_tiled(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                  void* workspace, cudaStream_t stream) {
  if (plan.shared) clear_flags(workspace, stream);
  auto run = [&]<bool kZeros, int kTokens, TiledSharing kSharing>() {
    constexpr int kGroups = tiled_groups(kTokens);
    TiledParams p = tiled_params<kGroups>(call, plan, workspace);
    make_tiled_maps<kBits, kGradient, kGroups>(p, kTokens);
    launch_overlapping(
        true,
        linear_quantized_tiled_kernel<T, kBits, kGradient, kZeros, kGroups, kTokens, kSharing>,
        dim3(static_cast<unsigned>(plan.ctas)), dim3(TiledThreads<kGroups>::kAll), plan.ranks,
        p.memory.size, stream, p);
  };
  for_bool(kBits == 4 && call.weight.zeros != nullptr, [&]<bool kZeros>() {
    if constexpr (kBits == 4 || !kZeros) {
      for_int<32, 64, 128, 256>(plan.tiles * 8, [&]<int kTokens>() {
        using enum TiledSharing;
        if (plan.ranks > 1) return run.template operator()<kZeros, kTokens, kCluster>();
        run.template operator()<kZeros, kTokens, tiled_may_share(kTokens) ? kParts : kNone>();
      });
    }
  });
}

}  // namespace warpwright
