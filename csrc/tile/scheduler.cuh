// Which D tile and which part of k a CTA works on. Blocks are numbered along grid.x only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/math.cuh"
#include "tile/raster.h"

namespace warpwright {

// `batches` independent products (a convolution's groups) of tiles_m x tiles_n tiles, each cut into
// `splits` runs of k tiles. Divisors are stored as FastDivmod: plain divisions took longer than the
// products of a tile with short k.
struct TileGrid {
  int tiles_m = 0;
  int tiles_n = 0;
  int k_tiles = 0;
  int splits = 1;
  int batches = 1;
  // Blocks that run together cover about group_m tiles down and as many rows' worth across, so that
  // they share operands in L2.
  int group_m = 1;
  int split_k_tiles = 0;
  int longer_splits = 0;
  FastDivmod by_splits;
  FastDivmod by_tiles;            // of one split
  FastDivmod by_group;            // tiles of group_m rows
  FastDivmod by_group_rows;       // group_m
  FastDivmod by_last_group_rows;  // of the last group, which may be shorter

  // The first splits have one k tile more if k_tiles is not a multiple of the splits.
  __device__ __forceinline__ int first_k_tile(int split) const {
    return split * split_k_tiles + min(split, longer_splits);
  }

  void set_group_rows(int rows) {
    group_m = rows;
    const int last_rows = tiles_m % group_m;
    by_group = FastDivmod(std::max<int64_t>(1, int64_t{group_m} * tiles_n));
    by_group_rows = FastDivmod(group_m);
    by_last_group_rows = FastDivmod(last_rows == 0 ? group_m : last_rows);
  }

  int64_t num_blocks() const { return int64_t{tiles_m} * tiles_n * splits * batches; }
};

inline TileGrid make_tile_grid(int64_t m, int64_t n, int64_t k, int blk_m, int blk_n, int blk_k,
                               int splits = 1, int batches = 1) {
  TileGrid grid;
  grid.tiles_m = static_cast<int>(ceil_div<int64_t>(m, blk_m));
  grid.tiles_n = static_cast<int>(ceil_div<int64_t>(n, blk_n));
  grid.k_tiles = static_cast<int>(ceil_div<int64_t>(k, blk_k));
  grid.splits = splits;
  grid.batches = batches;
  grid.split_k_tiles = grid.k_tiles / splits;
  grid.longer_splits = grid.k_tiles % splits;
  grid.by_splits = FastDivmod(splits);
  grid.by_tiles = FastDivmod(std::max<int64_t>(1, int64_t{grid.tiles_m} * grid.tiles_n));
  grid.set_group_rows(std::clamp(kRasterRows / blk_m, 1, std::max(1, grid.tiles_m)));
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
  int outer, tile, group, in_group;
  grid.by_tiles.divmod(static_cast<int>(block), outer, tile);
  grid.by_group.divmod(tile, group, in_group);
  const int first_m = group * grid.group_m;
  const bool last = first_m + grid.group_m >= grid.tiles_m;
  TileCoord coord;
  int row;
  (last ? grid.by_last_group_rows : grid.by_group_rows).divmod(in_group, coord.n, row);
  coord.m = first_m + row;
  grid.by_splits.divmod(outer, coord.batch, coord.split);
  coord.k_begin = grid.first_k_tile(coord.split);
  coord.k_end = grid.first_k_tile(coord.split + 1);
  return coord;
}

}  // namespace warpwright
