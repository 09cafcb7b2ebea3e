// The output tiles of a matrix product: one table for the portable path (mma.sync and FMA), one for
// the sm_90a path (wgmma). A tile is named by its extents, rows x columns of D.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "tile/major.h"

namespace warpwright {

enum class GemmKind { k16Bit, kTf32, kFp32, kFp64 };

constexpr GemmKind gemm_kind(DType dtype, bool tf32) {
  if (dtype == DType::kFloat64) return GemmKind::kFp64;
  if (dtype == DType::kFloat32) return tf32 ? GemmKind::kTf32 : GemmKind::kFp32;
  return GemmKind::k16Bit;
}

constexpr int64_t gemm_kind_size(GemmKind kind) {
  return kind == GemmKind::k16Bit ? 2 : kind == GemmKind::kFp64 ? 8 : 4;
}

constexpr bool uses_tensor_cores(GemmKind kind) {
  return kind == GemmKind::k16Bit || kind == GemmKind::kTf32;
}

enum class GemmTile {
  k128x256,
  k128x128,
  k128x64,
  k64x64,
  k64x64Gathered,  // portable alone
  k64x64Elements,
  k192x192,  // sm_90a alone
  k128x192,
};
constexpr int kPortableTiles = 6;

// ---- portable ----

struct TileShape {
  int blk_m;
  int blk_n;
  int blk_k;
  int warps_m;
  int warps_n;
  int stages;
  int ctas_per_sm;  // that the registers must leave room for; 0: this kind has no such tile
};

// Tensor cores: warps of 64 x 64 read the fewest bytes of shared memory per FLOP (16 FMA per byte;
// mma.sync starves below about 10). A stage's k is 128 bytes: whole cache lines.
//   128x256  least L2 traffic; all registers of an SM
//   128x128  the same warps in half the CTA, for outputs that 128x256 cuts too coarsely
//   64x64    fills the GPU if the output is small; of a matrix's tiles, the only one that can read
//            element by element
// Operands that are gathered (conv2d) have 128x128, 128x64 for at most 64 columns, and
// k64x64Gathered by 16-byte accesses. k64x64Elements takes any operand: its loaders hold
// coordinates and, at 16 bits, a tile's elements in registers.
// FMA: 8 x 8 results per thread if D is large, else 8 x 4. 16 x 8 are 4 % faster on some large
// products, but have half the threads: with one CTA per SM they take 1.6 times as long.
constexpr TileShape portable_tile(GemmKind kind, GemmTile tile) {
  constexpr TileShape kShapes[4][kPortableTiles] = {
      {{128, 256, 64, 2, 4, 3, 1},
       {128, 128, 64, 2, 2, 3, 2},
       {128, 64, 64, 2, 2, 3, 2},
       {64, 64, 64, 2, 2, 4, 3},
       {64, 64, 64, 2, 2, 3, 3},
       {64, 64, 32, 2, 2, 3, 2}},
      {{128, 256, 32, 2, 4, 3, 1},
       {128, 128, 32, 2, 2, 3, 2},
       {128, 64, 32, 2, 2, 3, 2},
       {64, 64, 32, 2, 2, 4, 3},
       {64, 64, 32, 2, 2, 3, 3},
       {64, 64, 32, 2, 2, 3, 2}},
      {{}, {128, 128, 16, 4, 2, 4, 2}, {}, {64, 64, 16, 2, 2, 4, 2}, {}, {64, 64, 16, 2, 2, 3, 2}},
      {{}, {}, {}, {64, 64, 16, 2, 2, 3, 2}, {}, {64, 64, 16, 2, 2, 3, 2}},
  };
  return kShapes[static_cast<int>(kind)][static_cast<int>(tile)];
}

// Shared memory of a tile: the stages (each row padded by 16 bytes) or the epilogue's D tile.
constexpr int64_t tile_smem_bytes(GemmKind kind, TileShape shape) {
  const int64_t stages = int64_t{shape.stages} * (shape.blk_m + shape.blk_n) *
                         (shape.blk_k * gemm_kind_size(kind) + 16);
  const int64_t epilogue =
      int64_t{shape.blk_m} * (shape.blk_n + 8) * (kind == GemmKind::kFp64 ? 8 : 4);
  return std::max(stages, epilogue);
}

// ---- sm_90a ----

// How operands reach wgmma when TMA cannot load them or wgmma cannot read their layout.
enum class Sm90Loading {
  kTma,         // directly
  kRealigned,   // 16-bit rows that do not start at multiples of 16 bytes, shifted on their way
  kSwapped,     // TF32 with B n-major: D^T = B A^T, B through registers
  kTransposed,  // the same with A m-major, which is transposed in shared memory
  kSplit,       // float32, each number the sum of two TF32 numbers
};

struct Sm90TileShape {
  int blk_m;
  int blk_n;
  int stages;             // 0: this loading has no such tile
  bool ping_pong;         // each of the two consumer warpgroups has a tile of its own
  bool clusters = false;  // may run in clusters: choose_sm90_cluster()
};

// A CTA has the SM to itself, and a stage's k is 128 bytes. docs/kernels/linear.md has the measured
// times.
//
// kTma
//   128x128  ping-pong: one warpgroup stores while the other multiplies. Within 2 % of the fastest
//            tile if the output fills the SMs several times.
//   128x64, 64x64  for outputs with fewer tiles than SMs
//   128x256  reads three quarters of the bytes of 128x128 from L2, but nothing overlaps its store.
//            For TF32 (a k tile of 128 bytes is half as deep for the same math), and at 16 bits for
//            a long k and few rounds.
//   128x192, 192x192  for outputs that the others cut into a bad number of tiles, such as 768
//            columns
// kRealigned: two warpgroups load through L1, which needs the shared memory of more stages.
// kSwapped: each warpgroup has a tile of its own. B comes from registers in units of 64 rows.
// kTransposed: both warpgroups share 128x256. More columns per A leave shared memory more time to
//   transpose A.
// kSplit: both warpgroups share one tile, because each k tile has sums next to the tile's. A stage
//   has three tiles of 16 KiB.
constexpr Sm90TileShape sm90_tile(Sm90Loading loading, GemmTile tile) {
  if (loading == Sm90Loading::kTma && tile == GemmTile::k192x192) return {192, 192, 4, false};
  if (loading == Sm90Loading::kTma && tile == GemmTile::k128x192) return {128, 192, 4, true};
  constexpr Sm90TileShape kShapes[5][4] = {
      {{128, 256, 4, false}, {128, 128, 6, true}, {128, 64, 8, false, true}, {64, 64, 8, true}},
      {{}, {128, 128, 4, true}, {}, {}},
      {{}, {128, 128, 6, true}, {128, 64, 8, true}, {}},
      {{128, 256, 4, false}, {128, 128, 6, true}, {}, {}},
      {{}, {128, 128, 4, false}, {}, {}},
  };
  const int t = static_cast<int>(tile);
  return t < 4 ? kShapes[static_cast<int>(loading)][t] : Sm90TileShape{};
}

// Tiles with 192 columns are for 16 bits; 192x192 is for weight gradients.
constexpr bool has_sm90_tile(GemmKind kind, Sm90Loading loading, GemmTile tile, Major major_a,
                             Major major_b) {
  const Sm90TileShape shape = sm90_tile(loading, tile);
  if (shape.blk_n == 192 && kind != GemmKind::k16Bit) return false;
  const bool is_weight_gradient = major_a == Major::kMN && major_b == Major::kMN;
  return shape.stages > 0 && (tile != GemmTile::k192x192 || is_weight_gradient);
}

// The tiles of products whose k is split inside a cluster (cluster_split_sm90.cuh): 16 bits, loaded
// by TMA. Nothing overlaps the store of the cluster's only tile. Of a ping-pong tile one warpgroup
// multiplies: two with 64 rows each took 790 cycles for a k tile of 128x128, one takes 640.
constexpr Sm90TileShape cluster_split_tile(GemmTile tile) {
  Sm90TileShape shape = sm90_tile(Sm90Loading::kTma, tile);
  shape.clusters = false;  // it shares no loads
  return shape;
}

// The large tiles are for weight gradients, 128x64 for a forward or an input's gradient of few
// rows.
constexpr bool has_cluster_split_tile(GemmTile tile, Major major_a, Major major_b) {
  if (major_a == Major::kK) return tile == GemmTile::k128x64;
  if (major_b == Major::kK) return false;
  return tile == GemmTile::k192x192 || tile == GemmTile::k128x256 || tile == GemmTile::k128x128;
}

// From the largest.
constexpr GemmTile kSm90Tiles[] = {GemmTile::k192x192, GemmTile::k128x256, GemmTile::k128x192,
                                   GemmTile::k128x128, GemmTile::k128x64,  GemmTile::k64x64};

}  // namespace warpwright
