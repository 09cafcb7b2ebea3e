// A convolution that also takes the batch norm's statistics of its output, while it stores its
// tiles: batch norm then reads the output once in place of twice. A second kernel merges the CTAs'
// records. For 16-bit rows of channels on sm_90a.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <variant>

#include "ops/batch_norm/batch_norm.h"
#include "ops/conv2d/plan.h"

namespace warpwright {

// Per CTA of a tile: of two consumers, each in two columns of tiles. A CTA of the kernel for a
// short k has one, of all channels.
constexpr int kMomentsRecords = 4;

struct Conv2dMomentsPlan {
  std::variant<TmaIm2colConfig, RowWalkConfig, MatrixProductConfig> kernel;
  int64_t ctas;
  int64_t columns;  // channels of a record
  int records_per_cta = kMomentsRecords;

  int64_t records() const { return ctas * records_per_cta; }
  // The moments (float2) come first, then the records' headers (two int each).
  int64_t workspace_bytes() const { return records() * (columns + 1) * 8; }
};

// A tile of the kernels, if they have a form with moments.
struct MomentsTile {
  int64_t rows, columns;
  bool ping_pong;
};
inline std::optional<MomentsTile> moments_tile(const TmaIm2colConfig& config) {
  const Sm90TileShape shape = tma_im2col_tile(config.tile);
  if (config.splits > 1 || config.stores_planes) return std::nullopt;
  switch (config.tile) {
    case TmaIm2colTile::k256x128:
    case TmaIm2colTile::k128x128:
      return MomentsTile{shape.blk_m, shape.blk_n, shape.ping_pong};
    case TmaIm2colTile::kTransposed:
      return MomentsTile{shape.blk_n, shape.blk_m, shape.ping_pong};
    default:
      return std::nullopt;
  }
}
inline std::optional<MomentsTile> moments_tile(const MatrixProductConfig& config) {
  const GemmPlan& plan = config.plan;
  if (plan.kind != GemmKind::k16Bit || plan.loading != Sm90Loading::kTma || plan.splits > 1 ||
      plan.cluster > 1 || (plan.tile != GemmTile::k128x128 && plan.tile != GemmTile::k64x64)) {
    return std::nullopt;
  }
  const Sm90TileShape shape = sm90_tile(plan.loading, plan.tile);
  return MomentsTile{shape.blk_m, shape.blk_n, shape.ping_pong};
}

// A consumer keeps the sums of two columns of tiles. CTA c takes the tiles c, c + ctas, ...; with
// ping-pong a consumer takes every second of them.
inline bool meets_few_columns(const MomentsTile& tile, int64_t tiles, int64_t across,
                              int64_t ctas) {
  const int64_t step = ctas * (tile.ping_pong ? 2 : 1);
  return tiles <= ctas || across / std::gcd(across, step) <= 2;
}

// Whether batch norm's single launch keeps all rows on chip. It then reads the convolution's output
// once, and moments would save nothing. `operands`: 1, or 2 with a residual.
inline bool batch_norm_keeps_all(const BatchNormExtents& e, DType dtype, int operands,
                                 const DeviceInfo& device) {
  const BatchNormPlan plan = plan_batch_norm(e, dtype, /*addresses=*/0, operands, device);
  const int64_t steps = ceil_div(ceil_div(e.count(), plan.splits), kRowsThreads / plan.lanes);
  return plan.held >= steps;
}

// No plan: another kernel computes the convolution, or batch norm takes its own statistics.
struct Conv2dMomentsChoice {
  std::optional<Conv2dMomentsPlan> plan;
  const char* why_not;
};

// `operands`: those of batch norm, 1, or 2 with a residual.
inline Conv2dMomentsChoice choose_conv2d_moments(const Conv2dParams& p, int operands,
                                                 const DeviceInfo& device) {
  auto none = [](const char* why_not) { return Conv2dMomentsChoice{std::nullopt, why_not}; };
  const Conv2dShape& s = p.shape;
  if (!s.sm90 || !s.channels_last || dtype_size(s.dtype) != 2) {
    return none("only 16-bit channels-last images on Hopper");
  }
  if (s.groups > 1) return none("groups");
  if (s.k % 8 != 0 || address_of(p.output) % 16 != 0) return none("TMA cannot store the output");
  if (batch_norm_keeps_all({s.n, s.k, s.p * s.q, true}, s.dtype, operands, device)) {
    return none("it keeps the output on chip and reads it once");
  }
  const Conv2dFpropPlan plan = choose_conv2d(p, device);
  auto with = [&](const auto& config) {
    const auto tile = moments_tile(config);
    if (!tile) return none("the convolution's tile has no form with statistics");
    const int64_t across = ceil_div(s.k, tile->columns);
    const int64_t tiles = ceil_div(s.n * s.p * s.q, tile->rows) * across;
    const int64_t ctas = std::min<int64_t>(tiles, device.num_sms);
    if (!meets_few_columns(*tile, tiles, across, ctas)) {
      return none("a CTA would meet more than two columns of tiles");
    }
    return Conv2dMomentsChoice{Conv2dMomentsPlan{config, ctas, tile->columns}, nullptr};
  };
  if (const auto* windows = std::get_if<TmaIm2colConfig>(&plan.kernel)) return with(*windows);
  if (const auto* walk = std::get_if<RowWalkConfig>(&plan.kernel)) {
    return {Conv2dMomentsPlan{*walk, walk->ctas, /*columns=*/64}, nullptr};
  }
  if (const auto* product = std::get_if<MatrixProductConfig>(&plan.kernel)) {
    if (product->plan.variant != GemmVariant::kShortK || p.bias != nullptr) return with(*product);
    constexpr int64_t kMergedColumns = 32;  // by a block of the merge: a record is multiples of it
    return {Conv2dMomentsPlan{*product, product->plan.short_k.ctas,
                              ceil_div<int64_t>(s.k, kMergedColumns) * kMergedColumns,
                              /*records_per_cta=*/1},
            nullptr};
  }
  return none("the convolution's kernel has no form with statistics");
}

inline std::string describe(const Conv2dMomentsChoice& choice) {
  if (!choice.plan) {
    return std::string("batch norm takes them from the convolution's output (") + choice.why_not +
           ")";
  }
  const bool tiles = choice.plan->records_per_cta == kMomentsRecords;
  return "taken by the convolution as it stores " +
         (tiles ? "tiles of " + std::to_string(choice.plan->columns) + " channels"
                : std::string("rows")) +
         ", " + std::to_string(choice.plan->records()) + " records merged";
}

#ifdef WARPWRIGHT_WITH_CUDA
// `moments` (channels) gets mean and sum of squared deviations per channel, two floats each.
// `workspace` is 16-byte aligned.
void launch_conv2d_moments(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                           void* workspace, void* moments, cudaStream_t stream);
#endif

}  // namespace warpwright
