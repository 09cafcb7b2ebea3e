// The output tiles of linear's matrix products, one table for mma.sync and FMA, one for wgmma.
#pragma once

#include <algorithm>
#include <cstdint>

namespace warpwright {

enum class GemmKind { k16Bit, kTf32, kFp32, kFp64 };
enum class GemmTile { kLarge, kMedium, kSmall, kWide };  // kWide: TF32 on sm_90a

struct TileShape {
  int blk_m;
  int blk_n;
  int blk_k;
  int warps_m;
  int warps_n;
  int stages;
  int ctas_per_sm;  // that the registers must leave room for; 0: this kind has no such tile
};

// Tensor cores: warps of 64 x 64 read shared memory least for their math (16 FMA a byte; mma.sync
// starves below ~10). Large: least L2 traffic, all registers of an SM. Medium: the same warps with
// half the CTA, for outputs that Large cuts too coarsely. Small: fills the GPU when the output is
// small, and the only one that reads unaligned operands. k depth is 128 bytes: whole cache lines.
// FMA: 8 x 8 results a thread where D is large, else 8 x 4. 16 x 8 are 4 % faster on some large
// products, but half as many threads, which where they are one CTA an SM take 1.6 times as long.
constexpr TileShape tile_shape(GemmKind kind, GemmTile tile) {
  constexpr TileShape kShapes[4][3] = {
      // kLarge                     kMedium                      kSmall
      {{128, 256, 64, 2, 4, 3, 1}, {128, 128, 64, 2, 2, 3, 2}, {64, 64, 64, 2, 2, 4, 3}},
      {{128, 256, 32, 2, 4, 3, 1}, {128, 128, 32, 2, 2, 3, 2}, {64, 64, 32, 2, 2, 4, 3}},
      {{}, {128, 128, 16, 4, 2, 4, 2}, {64, 64, 16, 2, 2, 4, 2}},
      {{}, {}, {64, 64, 16, 2, 2, 3, 2}},
  };
  return kShapes[static_cast<int>(kind)][static_cast<int>(tile)];
}

constexpr int64_t gemm_kind_size(GemmKind kind) {
  return kind == GemmKind::k16Bit ? 2 : kind == GemmKind::kFp64 ? 8 : 4;
}

// Shared memory of a tile: the stages (each row padded by 16 bytes) or the epilogue's D tile.
constexpr int64_t tile_smem_bytes(GemmKind kind, TileShape shape) {
  const int64_t stages = int64_t{shape.stages} * (shape.blk_m + shape.blk_n) *
                         (shape.blk_k * gemm_kind_size(kind) + 16);
  const int64_t epilogue =
      int64_t{shape.blk_m} * (shape.blk_n + 8) * (kind == GemmKind::kFp64 ? 8 : 4);
  return std::max(stages, epilogue);
}

// The same on sm_90a: TMA and wgmma. A CTA has the SM to itself, k depth is 128 bytes.
struct Sm90TileShape {
  int blk_m;
  int blk_n;
  int stages;             // 192 KiB in all, 128 KiB for 64 x 64
  bool ping_pong;         // each of the two consumer warpgroups has a tile of its own
  bool clusters = false;  // there may be some: choose_sm90_cluster()
};

// Large: one warpgroup stores while the other multiplies. Within 2 % of the fastest of all tiles
// (128 x 256, 256 x 128, 64 x 256, each with and without a cluster) wherever the output fills the
// SMs. Medium and Small: for outputs with fewer tiles than SMs. docs/kernels.md has the race.
// Wide, of TF32 only, whose k tile of 128 bytes is half as deep for the same math: three quarters
// of Large's bytes, against a store that nothing hides.
constexpr Sm90TileShape sm90_tile_shape(GemmTile tile) {
  constexpr Sm90TileShape kShapes[4] = {
      {128, 128, 6, true}, {128, 64, 8, false, true}, {64, 64, 8, true}, {128, 256, 4, false}};
  return kShapes[static_cast<int>(tile)];
}

// Of operands that TMA cannot address: two warpgroups bring them in, through L1, which wants the
// shared memory that more stages would take.
constexpr Sm90TileShape kRealignedTile = {128, 128, 4, true};

// Of float32 split into TF32 numbers: both warpgroups on one tile, beside whose sums each k tile
// has its own. Three tiles of 16 KiB a stage.
constexpr Sm90TileShape kSplitTile = {128, 128, 4, false};

// Of TF32 whose B is n-major: the product is made as D^T = B A^T, B from registers in units of 64.
// There is no kSmall. With A k-major each warpgroup has a tile of its own. Else A is turned, for
// which shared memory has more time the more columns meet it: a 128 x 256 tile for both.
constexpr Sm90TileShape kSwappedTiles[2] = {{128, 128, 6, true}, {128, 64, 8, true}};
constexpr Sm90TileShape kTurnedTiles[2] = {{128, 256, 4, false}, {128, 128, 6, true}};

// How the sm_90a path gets the operands to wgmma, which TMA cannot or wgmma does not read as they
// lie.
enum class Sm90Operands {
  kAsTheyLie,
  kRealigned,  // 16-bit rows that start at no multiples of 16 bytes, moved into place
  kSwapped,    // TF32 with B n-major: D^T = B A^T, B through registers
  kTurned,     // and A m-major: turned in shared memory
  kSplit,      // float32, each the sum of two TF32 numbers
};

constexpr Sm90TileShape sm90_tile_shape(GemmTile tile, Sm90Operands operands) {
  switch (operands) {
    case Sm90Operands::kAsTheyLie:
      return sm90_tile_shape(tile);
    case Sm90Operands::kRealigned:
      return kRealignedTile;
    case Sm90Operands::kSplit:
      return kSplitTile;
    case Sm90Operands::kSwapped:
      return kSwappedTiles[static_cast<int>(tile)];
    default:
      return kTurnedTiles[static_cast<int>(tile)];
  }
}

}  // namespace warpwright
