// dgrad that adds another gradient of x, the addend, before it rounds. At the start of a residual
// block this replaces the addition of the shortcut's gradient. For 16-bit channels-last images on
// sm_90a.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "ops/conv2d/cuda/matrix_product.h"
#include "ops/conv2d/cuda/row_walk/row_walk.h"
#include "ops/conv2d/cuda/sm90/config.h"

namespace warpwright {

// Rows x columns of D. kTransposed as TmaIm2colTile's.
enum class JoinTile { k128x128, k128x64, kTransposed };

// The addend's part of a tile takes the shared memory of some stages of conv2d's tiles.
constexpr Sm90TileShape join_tile(JoinTile tile) {
  constexpr Sm90TileShape kShapes[] = {{128, 128, 4, true}, {128, 64, 6, true}, {64, 256, 3, true}};
  return kShapes[static_cast<int>(tile)];
}

struct JoinedDgradConfig {
  JoinTile tile;
  bool is_product;  // 1x1 as a matrix product; else windows by TMA
};

// None if the addition needs a kernel of its own. `plain`: the configuration without an addend.
inline std::optional<JoinedDgradConfig> choose_joined_dgrad(const Conv2dShape& s,
                                                            const MatrixProductConfig& plain) {
  const bool reads_by_tma =
      plain.plan.kind == GemmKind::k16Bit && plain.plan.loading == Sm90Loading::kTma;
  if (!reads_by_tma || s.c % 8 != 0) return std::nullopt;
  return JoinedDgradConfig{s.c > 64 ? JoinTile::k128x128 : JoinTile::k128x64, true};
}

inline std::optional<JoinedDgradConfig> choose_joined_dgrad(const Conv2dShape& s,
                                                            const TmaIm2colConfig& plain) {
  if (plain.kind != GemmKind::k16Bit || plain.stores_planes) return std::nullopt;
  if (plain.tile == TmaIm2colTile::kTransposed) {
    return JoinedDgradConfig{JoinTile::kTransposed, false};
  }
  for (const auto& [joined, tile] : {std::pair(JoinTile::k128x128, TmaIm2colTile::k128x128),
                                     {JoinTile::k128x64, TmaIm2colTile::k128x64}}) {
    const bool fits = s.group_c() > 64 || joined == JoinTile::k128x64;
    if (fits && takes_tile(ConvDirection::kDgrad, s, tile)) return JoinedDgradConfig{joined, false};
  }
  return std::nullopt;
}

// The walks have no form that adds.
inline std::optional<JoinedDgradConfig> choose_joined_dgrad(const Conv2dShape& s,
                                                            const RowWalkConfig& plain) {
  if (plain.kind != GemmKind::k16Bit) return std::nullopt;
  const bool transposed = takes_tile(ConvDirection::kDgrad, s, TmaIm2colTile::kTransposed);
  return JoinedDgradConfig{transposed ? JoinTile::kTransposed
                           : s.c > 64 ? JoinTile::k128x128
                                      : JoinTile::k128x64,
                           false};
}

template <class Config>
std::optional<JoinedDgradConfig> choose_joined_dgrad(const Conv2dShape&, const Config&) {
  return std::nullopt;
}

inline std::string describe(const JoinedDgradConfig& config) {
  const Sm90TileShape shape = join_tile(config.tile);
  return std::string(config.is_product ? "1x1 as a matrix product: sm_90a 16-bit wgmma, "
                                       : "sm_90a 16-bit wgmma, windows by TMA, ") +
         (config.tile == JoinTile::kTransposed ? "transposed " : "") + "tile " +
         extents(shape.blk_m, shape.blk_n) + " ping-pong, " + std::to_string(shape.stages) +
         " stages, adds the shortcut's gradient";
}

}  // namespace warpwright
