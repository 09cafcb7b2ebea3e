// The order in which CTAs take the tiles of an attention kernel. A tile is some rows of one head:
// queries of the forward and of dq, keys of dk and dv.
//
// Heads come in sections, and a section's tiles run together, so that they read its other operand
// (K and V, or Q and dO) once from memory. All sections but the last are one group of heads. The
// last has two rounds of tiles, if its operands fit half of L2. Within a section the longest tiles
// come first, heads fastest, so that only short tiles remain at the end. CTAs are persistent. Each
// starts with the tile of its own number and then takes the next free one from `counter`. Tiles
// take different times under the causal rule, and SMs run at different speeds. Which CTA computes a
// tile changes no bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "device/math.cuh"

namespace warpwright {

struct TileSchedule {
  int num_tiles = 0;                 // of all heads
  int rows_tiles = 0;                // per head
  int last_tile = 0, last_head = 0;  // the first ones of the last section
  int section = 1;                   // heads of each other section
  bool longest_is_last = true;  // the last rows of a head have the most work, else the first rows
  int* counter =
      nullptr;            // tiles taken beyond the first of each CTA; null: every gridDim.x-th tile
  FastDivmod by_section;  // section * rows_tiles
  FastDivmod by_heads;    // section (of packed sequences: of their list)
  FastDivmod by_last_heads;
  FastDivmod by_H;
  FastDivmod by_group;  // query heads per head of K and V

  struct Tile {
    int rows;  // number of the tile within its head
    int head;  // b * heads + h
  };

  __device__ __forceinline__ Tile tile(int index) const {
    int first_head, rank, head;
    if (index >= last_tile) {
      first_head = last_head;
      by_last_heads.divmod(index - last_tile, rank, head);
    } else {
      int number, in_section;
      by_section.divmod(index, number, in_section);
      first_head = number * section;
      by_heads.divmod(in_section, rank, head);
    }
    return {longest_is_last ? rows_tiles - 1 - rank : rank, first_head + head};
  }
};

// heads: of the tiles, over all batches. group: query heads per head of K and V. A section holds
// whole groups. head_bytes: of the operand that a tile of one head (of one group) reads.
inline TileSchedule make_tile_schedule(int64_t heads, int64_t H, int64_t group, int64_t rows_tiles,
                                       int64_t head_bytes, const DeviceInfo& device,
                                       bool longest_is_last) {
  TileSchedule s;
  const int64_t groups = heads / group;
  const int64_t fitting = device.l2_bytes / 2 / std::max<int64_t>(1, head_bytes);
  const int64_t two_rounds = ceil_div(int64_t{2} * device.num_sms, group * rows_tiles);
  const int64_t last_groups = std::clamp<int64_t>(std::min(two_rounds, fitting), 1, groups);
  s.section = static_cast<int>(group);
  s.rows_tiles = static_cast<int>(rows_tiles);
  s.num_tiles = static_cast<int>(heads * rows_tiles);
  s.last_head = static_cast<int>((groups - last_groups) * group);
  s.last_tile = static_cast<int>(s.last_head * rows_tiles);
  s.longest_is_last = longest_is_last;
  s.by_section = FastDivmod(group * rows_tiles);
  s.by_heads = FastDivmod(group);
  s.by_last_heads = FastDivmod(last_groups * group);
  s.by_H = FastDivmod(H);
  s.by_group = FastDivmod(group);
  return s;
}

}  // namespace warpwright
