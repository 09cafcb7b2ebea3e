// Which D tile and which part of k a CTA works on. Blocks are numbered along grid.x only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/math.cuh"

namespace warpwright {

// `batches` independent products (a convolution's groups) of tiles_m x tiles_n tiles, each cut into
// `splits` runs of k tiles.
struct TileGrid {
  int tiles_m = 0;
  int tiles_n = 0;
  int k_tiles = 0;
  int splits = 1;
  int batches = 1;
  // Blocks that run together cover about group_m tiles down and as many rows' worth across, so
  // that their operands meet in L2.
  int group_m = 1;

  int64_t num_blocks() const { return int64_t{tiles_m} * tiles_n * splits * batches; }
};

constexpr int kRasterRows = 2048;  // rows of A that one group of blocks shares

inline TileGrid make_tile_grid(int64_t m, int64_t n, int64_t k, int blk_m, int blk_n, int blk_k,
                               int splits = 1, int batches = 1) {
  TileGrid grid;
  grid.tiles_m = static_cast<int>(ceil_div<int64_t>(m, blk_m));
  grid.tiles_n = static_cast<int>(ceil_div<int64_t>(n, blk_n));
  grid.k_tiles = static_cast<int>(ceil_div<int64_t>(k, blk_k));
  grid.splits = splits;
  grid.batches = batches;
  grid.group_m = std::clamp(kRasterRows / blk_m, 1, std::max(1, grid.tiles_m));
  return grid;
}

struct TileCoord {
  int m;  // tile numbers: rows m * kBlkM ...
  int n;
  int split;
  int batch;
  int k_begin;  // k tiles [k_begin, k_end); never empty when splits <= k_tiles
  int k_end;
};

// Order: batch, split, group of tile rows, tile column, tile row within the group.
__device__ __forceinline__ TileCoord tile_of_block(const TileGrid& grid, unsigned block) {
  const unsigned tiles_m = grid.tiles_m;
  const unsigned tiles_n = grid.tiles_n;
  const unsigned tiles = tiles_m * tiles_n;
  const unsigned outer = block / tiles;
  const unsigned tile = block - outer * tiles;
  const unsigned group_tiles = grid.group_m * tiles_n;
  const unsigned group = tile / group_tiles;
  const unsigned in_group = tile - group * group_tiles;
  const unsigned first_m = group * grid.group_m;
  const unsigned rows = min(tiles_m - first_m, static_cast<unsigned>(grid.group_m));
  TileCoord coord;
  coord.n = static_cast<int>(in_group / rows);
  coord.m = static_cast<int>(first_m + in_group % rows);
  coord.batch = static_cast<int>(outer / grid.splits);
  coord.split = static_cast<int>(outer % grid.splits);
  coord.k_begin = static_cast<int>(int64_t{coord.split} * grid.k_tiles / grid.splits);
  coord.k_end = static_cast<int>(int64_t{coord.split + 1} * grid.k_tiles / grid.splits);
  return coord;
}

}  // namespace warpwright
