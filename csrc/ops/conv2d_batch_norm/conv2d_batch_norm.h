// A convolution that also takes the batch norm's statistics of its output, while it stores its
// tiles: batch norm then reads the output once in place of twice. A second kernel merges the CTAs'
// records. For 16-bit rows of channels on sm_90a.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <variant>

#include "ops/conv2d/plan.h"

namespace warpwright {

struct Conv2dMomentsPlan {
  std::variant<TmaIm2colConfig, MatrixProductConfig> kernel;
  int64_t ctas;
  int64_t columns;  // channels of a record

  int64_t records() const { return ctas * 4; }  // kMomentsRecords
  // The moments (float2) come first, then the records' headers (two int each).
  int64_t workspace_bytes() const { return records() * (columns + 1) * 8; }
};

// The kernels' tiles that have a form with moments, as channels of a tile; 0: none.
inline int64_t moments_columns(const TmaIm2colConfig& config) {
  if (config.splits > 1 || config.stores_planes) return 0;
  switch (config.tile) {
    case TmaIm2colTile::k256x128:
    case TmaIm2colTile::k128x128:
      return 128;
    case TmaIm2colTile::kTransposed:
      return 64;
    default:
      return 0;
  }
}
inline int64_t moments_columns(const MatrixProductConfig& config) {
  const GemmPlan& plan = config.plan;
  if (plan.kind != GemmKind::k16Bit || plan.loading != Sm90Loading::kTma || plan.splits > 1)
    return 0;
  if (plan.cluster > 1) return 0;
  return plan.tile == GemmTile::k128x128 ? 128 : plan.tile == GemmTile::k64x64 ? 64 : 0;
}

// None: another kernel computes the convolution, and batch norm its own statistics.
inline std::optional<Conv2dMomentsPlan> choose_conv2d_moments(const Conv2dParams& p,
                                                              const DeviceInfo& device) {
  const Conv2dShape& s = p.shape;
  if (!s.sm90 || !s.channels_last || dtype_size(s.dtype) != 2 || s.groups > 1) return std::nullopt;
  // TMA stores D.
  if (s.k % 8 != 0 || address_of(p.output) % 16 != 0) return std::nullopt;
  const Conv2dFpropPlan plan = choose_conv2d(p, device);
  const int64_t pixels = s.n * s.p * s.q;
  auto with = [&](const auto& config, int64_t rows) -> std::optional<Conv2dMomentsPlan> {
    const int64_t columns = moments_columns(config);
    if (columns == 0) return std::nullopt;
    const int64_t down = ceil_div(pixels, rows), tiles = down * ceil_div(s.k, columns);
    const int64_t ctas = std::min<int64_t>(tiles, device.num_sms);
    // A run of tiles meets two columns of tiles at most.
    if (ctas == 0 || ceil_div(tiles, ctas) > down) return std::nullopt;
    return Conv2dMomentsPlan{config, ctas, columns};
  };
  if (const auto* windows = std::get_if<TmaIm2colConfig>(&plan.kernel)) {
    const Sm90TileShape shape = tma_im2col_tile(windows->tile);
    const bool transposed = windows->tile == TmaIm2colTile::kTransposed;
    return with(*windows, transposed ? shape.blk_n : shape.blk_m);
  }
  if (const auto* product = std::get_if<MatrixProductConfig>(&plan.kernel)) {
    return with(*product, sm90_tile(Sm90Loading::kTma, product->plan.tile).blk_m);
  }
  return std::nullopt;
}

inline std::string describe(const std::optional<Conv2dMomentsPlan>& plan) {
  if (!plan) return "batch norm reads the convolution's output once more";
  return "taken by the convolution as it stores tiles of " + std::to_string(plan->columns) +
         " channels, " + std::to_string(plan->records()) + " records merged";
}

#ifdef WARPWRIGHT_WITH_CUDA
// `moments` (channels) gets mean and sum of squared deviations per channel, two floats each.
// `workspace` is 16-byte aligned.
void launch_conv2d_moments(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                           void* workspace, void* moments, cudaStream_t stream);
#endif

}  // namespace warpwright
