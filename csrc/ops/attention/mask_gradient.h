// The plan of the mask's gradient on sm_90a: dS summed over the dimensions that the mask
// broadcasts. A tile of the gradient is 128 queries by 128 keys. A step computes dS of one tile of
// scores; a tile takes the steps of all heads, batches and blocks of queries that share it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "ops/attention/params.h"

namespace warpwright {

constexpr int kMaskGradientSide = 128;  // of a tile
constexpr int64_t kMaskGradientTileBytes = int64_t{kMaskGradientSide} * kMaskGradientSide * 4;

struct MaskGradientPlan {
  int64_t tiles = 0;  // of the gradient; 0: not wanted
  int64_t steps = 0;  // per tile
  int parts = 1;      // of a tile's steps, each summed by another CTA

  constexpr int64_t units() const { return tiles * parts; }
  constexpr int64_t part_steps() const { return ceil_div(steps, int64_t{parts}); }
  // fp32 sums of the parts, added in order by a second kernel.
  constexpr int64_t workspace_bytes() const {
    return parts > 1 ? units() * kMaskGradientTileBytes : 0;
  }
};

// Few tiles leave SMs idle, so their steps are divided. A part costs about two steps more: its
// tile of the mask, and its sums through memory.
inline MaskGradientPlan plan_mask_gradient(const AttentionParams& p, int num_sms) {
  constexpr int kMostParts = 32;
  const int64_t row_tiles = ceil_div(p.S_q, int64_t{kMaskGradientSide});
  const int64_t col_tiles = ceil_div(p.S_k, int64_t{kMaskGradientSide});
  auto extent = [&](int dim, int64_t size) { return p.mask_full[dim] ? size : 1; };
  MaskGradientPlan plan;
  plan.tiles = extent(0, p.B) * extent(1, p.H) * extent(2, row_tiles) * col_tiles;
  plan.steps = p.B * p.H * row_tiles * col_tiles / plan.tiles;
  auto time = [&](int64_t parts) {
    return ceil_div(plan.tiles * parts, int64_t{num_sms}) * (ceil_div(plan.steps, parts) + 2);
  };
  const int64_t most = std::min(plan.steps, int64_t{kMostParts});
  for (int64_t parts = 2; parts <= most && plan.tiles * (parts - 1) < num_sms; ++parts)
    if (time(parts) < time(plan.parts)) plan.parts = static_cast<int>(parts);
  return plan;
}

inline std::string describe(const MaskGradientPlan& plan) {
  if (plan.tiles == 0) return "";
  std::string text = ", the mask's gradient in " + std::to_string(plan.tiles) + " tiles of " +
                     std::to_string(plan.steps) + " steps";
  if (plan.parts > 1) text += " in " + std::to_string(plan.parts) + " parts";
  return text;
}

}  // namespace warpwright
