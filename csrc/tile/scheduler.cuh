// Which D tile and which part of k a CTA works on. Blocks are numbered along grid.x only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/math.cuh"
#include "tile/raster.h"

namespace warpwright {

// `batches` independent products (a convolution's groups) of tiles_m x tiles_n tiles, each cut into
// `splits` runs of k tiles. Beside the extents what a kernel divides by: plain divisions took
// longer than the products of a tile of short k.
struct TileGrid {
  static constexpr bool kHasEmptyBlocks = false;

  int tiles_m = 0;
  int tiles_n = 0;
  int k_tiles = 0;
  int splits = 1;
  int batches = 1;
  // Blocks that run together cover about group_m tiles down and as many rows' worth across, so
  // that their operands meet in L2.
  int group_m = 1;
  int split_k_tiles = 0;
  int longer_splits = 0;
  FastDivmod by_splits;
  FastDivmod by_tiles;            // of one split
  FastDivmod by_group;            // tiles of group_m rows
  FastDivmod by_group_rows;       // group_m
  FastDivmod by_last_group_rows;  // of the last group, which may be shorter

  // The first splits have a k tile more, if they can't all have as many.
  __device__ __forceinline__ int first_k_tile(int split) const {
    return split * split_k_tiles + min(split, longer_splits);
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
  grid.group_m = std::clamp(kRasterRows / blk_m, 1, std::max(1, grid.tiles_m));
  const int last_group_rows = grid.tiles_m % grid.group_m;
  grid.split_k_tiles = grid.k_tiles / splits;
  grid.longer_splits = grid.k_tiles % splits;
  grid.by_splits = FastDivmod(splits);
  grid.by_tiles = FastDivmod(std::max<int64_t>(1, int64_t{grid.tiles_m} * grid.tiles_n));
  grid.by_group = FastDivmod(std::max<int64_t>(1, int64_t{grid.group_m} * grid.tiles_n));
  grid.by_group_rows = FastDivmod(grid.group_m);
  grid.by_last_group_rows = FastDivmod(last_group_rows == 0 ? grid.group_m : last_group_rows);
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

// The tile's number in that order, of a grid of one split and batch.
__device__ __forceinline__ int tile_number(const TileGrid& grid, int tile_m, int tile_n) {
  const int first_m = grid.by_group_rows.quotient(tile_m) * grid.group_m;
  const int rows = min(grid.group_m, grid.tiles_m - first_m);
  return first_m * grid.tiles_n + tile_n * rows + (tile_m - first_m);
}

// Stream-K: the k tiles of all tiles form one sequence, which is cut into one run per CTA. The
// lengths of runs differ by one at most. No run is longer than a tile, so that a CTA has parts of
// one or two tiles: blocks `cta` and `ctas + cta`. The second block may be empty. TileCoord::split
// numbers the parts of a tile in the order of k.
struct StreamKGrid {
  static constexpr bool kHasEmptyBlocks = true;

  TileGrid tiles;  // of one split
  int ctas = 0;
  int run = 0;          // k tiles
  int longer_runs = 0;  // the first CTAs' runs have one more
  FastDivmod by_k_tiles;
  FastDivmod by_run;
  FastDivmod by_longer_run;

  int64_t num_blocks() const { return int64_t{ctas} * 2; }

  __device__ __forceinline__ int first_of_run(int cta) const {
    return cta * run + min(cta, longer_runs);
  }
  // The CTA whose run has this k tile of the sequence.
  __device__ __forceinline__ int cta_of(int k_tile) const {
    const int rest = k_tile - longer_runs * (run + 1);
    return rest < 0 ? by_longer_run.quotient(k_tile) : longer_runs + by_run.quotient(rest);
  }
  __device__ __forceinline__ int parts_of(int tile) const {
    const int first = tile * tiles.k_tiles;
    return cta_of(first + tiles.k_tiles - 1) - cta_of(first) + 1;
  }
};

inline StreamKGrid make_stream_k_grid(const TileGrid& tiles, int ctas) {
  const int64_t all = int64_t{tiles.tiles_m} * tiles.tiles_n * tiles.k_tiles;
  StreamKGrid grid;
  grid.tiles = tiles;
  grid.ctas = ctas;
  grid.run = static_cast<int>(all / ctas);
  grid.longer_runs = static_cast<int>(all % ctas);
  grid.by_k_tiles = FastDivmod(tiles.k_tiles);
  grid.by_run = FastDivmod(grid.run);
  grid.by_longer_run = FastDivmod(grid.run + 1);
  return grid;
}

__device__ __forceinline__ TileCoord tile_of_block(const StreamKGrid& grid, unsigned block) {
  const int number = static_cast<int>(block);
  const bool second = number >= grid.ctas;
  const int cta = second ? number - grid.ctas : number;
  const int run_begin = grid.first_of_run(cta), run_end = grid.first_of_run(cta + 1);
  const int tile = grid.by_k_tiles.quotient(run_begin) + second;
  const int tile_begin = tile * grid.tiles.k_tiles;
  const int tile_end = tile_begin + grid.tiles.k_tiles;
  if (tile_begin >= run_end) return {};  // empty
  TileCoord coord = tile_of_block(grid.tiles, static_cast<unsigned>(tile));
  coord.k_begin = max(run_begin, tile_begin) - tile_begin;
  coord.k_end = min(run_end, tile_end) - tile_begin;
  coord.split = cta - grid.cta_of(tile_begin);
  return coord;
}

}  // namespace warpwright
