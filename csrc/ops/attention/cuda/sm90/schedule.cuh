// The order in which CTAs take the tiles of an attention kernel. A tile is some rows of one head:
// queries of the forward and of dq, keys of dk and dv.
//
// Heads come in sections whose other operand (K and V, or Q and dO) fits half of L2. Tiles that run
// together then read it from L2. Within a section the longest tiles come first, heads fastest, so
// that only short tiles remain at the end.
// CTAs are persistent. Each starts with the tile of its own number and then takes the next free one
// from `counter`. Tiles take different times under the causal rule, and SMs run at different
// speeds. Which CTA computes a tile changes no bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/math.cuh"

namespace warpwright {

struct TileSchedule {
  int num_tiles = 0;            // of all heads
  int rows_tiles = 0;           // per head
  int section = 1;              // heads per section
  int last_section_tile = 0;    // the first tile of the last section, which may have fewer heads
  bool longest_is_last = true;  // the last rows of a head have the most work, else the first rows
  int* counter =
      nullptr;            // tiles taken beyond the first of each CTA; null: every gridDim.x-th tile
  FastDivmod by_section;  // section * rows_tiles
  FastDivmod by_heads;    // section
  FastDivmod by_last_heads;
  FastDivmod by_H;
  FastDivmod by_group;  // query heads per head of K and V

  struct Tile {
    int rows;  // number of the tile within its head
    int head;  // b * heads + h
  };

  __device__ __forceinline__ Tile tile(int index) const {
    int number, in_section, rank, head;
    by_section.divmod(index, number, in_section);
    (index >= last_section_tile ? by_last_heads : by_heads).divmod(in_section, rank, head);
    return {longest_is_last ? rows_tiles - 1 - rank : rank, number * section + head};
  }
};

// heads: of the tiles, over all batches. group: query heads per head of K and V. A section holds
// whole groups. head_bytes: of the operand that a tile of one head (of one group) reads.
inline TileSchedule make_tile_schedule(int64_t heads, int64_t H, int64_t group, int64_t rows_tiles,
                                       int64_t head_bytes, int64_t l2_bytes, bool longest_is_last) {
  TileSchedule s;
  const int64_t fitting = std::max<int64_t>(1, l2_bytes / 2 / std::max<int64_t>(1, head_bytes));
  s.section = static_cast<int>(std::min(heads, fitting * group));
  s.rows_tiles = static_cast<int>(rows_tiles);
  s.num_tiles = static_cast<int>(heads * rows_tiles);
  const int last_heads = static_cast<int>((heads - 1) % s.section) + 1;
  s.last_section_tile = static_cast<int>((heads - last_heads) * rows_tiles);
  s.longest_is_last = longest_is_last;
  s.by_section = FastDivmod(int64_t{s.section} * rows_tiles);
  s.by_heads = FastDivmod(s.section);
  s.by_last_heads = FastDivmod(last_heads);
  s.by_H = FastDivmod(H);
  s.by_group = FastDivmod(group);
  return s;
}

}  // namespace warpwright
