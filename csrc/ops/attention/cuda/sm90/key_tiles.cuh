// Shared by the kernels of dk and dv: tiles of keys, the walk over the blocks of queries with a
// visible key of the tile, and the mask of a tile of scores. Rows of these scores are keys.
#pragma once

#include "device/sm90/cluster.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/attention/cuda/sm90/mask.cuh"
#include "ops/attention/cuda/sm90/params.cuh"

namespace warpwright {

// Keys per list of a mask (ops/attention/mask_tiles.h), which may be two tiles.
constexpr int kMaskKeyTile = 128;

template <class T, class Tile>
struct KeyTilesSm90 {
  static constexpr int kScoreRegs = Tile::kBlockM / 2;

  using Params = ParamsOf<AttentionDkdvSm90Params, Tile>;
  using Mask = ScoreMask<Tile::kMask, T, Tile::kBlockM, /*kByKey=*/true>;

  const Params& p;

  struct Work : SequenceOf<Tile> {
    int col0, head, b, h_kv;
    int first_block, blocks;  // of queries that see a key of the tile, without a mask
    int mask_tile;            // of 128 keys, its number within the head
  };
  __device__ __forceinline__ Work work(int tile) const {
    if constexpr (is_packed<Tile>)
      return work_of_sequence(tile);
    else
      return work_of_batch(tile);
  }
  __device__ __forceinline__ Work work_of_sequence(int slot) const {
    Work w;
    const SequenceTile at = read_sequence_tile(slot);
    w.S_q = at.S_q, w.S_k = at.S_k, w.q_end = at.q_end, w.k_end = at.k_end, w.stats = at.stats;
    w.col0 = at.row0;
    w.mask_tile = 0;
    w.b = 0, w.h_kv = w.head = at.head;
    const int col = w.col0 - w.shift();
    if constexpr (Tile::kWindowed) {
      const BlockRange range =
          queries_in_window<Tile::kBlockM>(p.window, col, Tile::kBlockN, w.S_q);
      w.first_block = range.first;
      w.blocks = range.count;
    } else {
      w.first_block = p.is_causal ? max(0, col) / Tile::kBlockM : 0;
      w.blocks = max(0, (w.S_q + Tile::kBlockM - 1) / Tile::kBlockM - w.first_block);
    }
    return w;
  }
  __device__ __forceinline__ Work work_of_batch(int tile) const {
    Work w;
    const TileSchedule::Tile at = p.schedule.tile(tile);
    w.col0 = at.rows * Tile::kBlockN;
    w.mask_tile = w.col0 / kMaskKeyTile;
    w.head = at.head;
    p.schedule.by_H.divmod(at.head, w.b, w.h_kv);
    if constexpr (Tile::kWindowed) {
      const BlockRange range =
          queries_in_window<Tile::kBlockM>(p.window, w.col0, Tile::kBlockN, p.S_q);
      w.first_block = range.first;
      w.blocks = range.count;
    } else {
      w.first_block = p.is_causal ? w.col0 / Tile::kBlockM : 0;
      w.blocks = max(0, (p.S_q + Tile::kBlockM - 1) / Tile::kBlockM - w.first_block);
    }
    return w;
  }

  // The blocks of queries of one head of the group.
  struct Blocks {
    int plane, count;
    MaskedBlocks<Tile::kMask> visible;
  };
  __device__ __forceinline__ Blocks blocks_of(const Work& w, int member) const {
    if constexpr (Tile::kMasked) {
      const int plane = mask_plane(p.mask, w.b, w.h_kv * p.group + member);
      return {
          plane, mask_count(p.mask, plane, w.mask_tile), {mask_list(p.mask, plane, w.mask_tile)}};
    } else {
      return {0, w.blocks, {}};  // counted from w.first_block
    }
  }
  // Of all heads of the group.
  __device__ __forceinline__ int steps_of(const Work& w) const {
    if constexpr (!Tile::kMasked) return w.blocks * p.group;
    int steps = 0;
    for (int member = 0; member < p.group; ++member) steps += blocks_of(w, member).count;
    return steps;
  }

  // A consumer's place among the blocks of the group's heads.
  struct Walk {
    int member = 0, block = 0;
    Blocks blocks;
    uint32_t entry;
    Mask mask;
    int head = 0;  // of the queries, over all batches
  };
  __device__ __forceinline__ Walk start(const Work& w, int col0, int consumer) const {
    if constexpr (Tile::kMasked) {
      const Blocks blocks = blocks_of(w, 0);
      const int h = w.h_kv * p.group;
      return {0, 0, blocks, 0, {p.mask, p.S_q, p.S_k, blocks.plane, w.b, h, col0, consumer}};
    } else {
      return {};
    }
  }
  // The first query of the next block.
  __device__ __forceinline__ int next_row(Walk& walk, const Work& w) const {
    if constexpr (Tile::kMasked) {
      while (walk.block == walk.blocks.count) {
        walk.blocks = blocks_of(w, ++walk.member);
        walk.block = 0;
        walk.mask.plane = walk.blocks.plane;
        ++walk.mask.h;
      }
      walk.head = w.head * p.group + walk.member;
      walk.entry = walk.blocks.visible.entry(walk.block++);
      return static_cast<int>(walk.entry >> kMaskEntryShift) * Tile::kBlockM;
    } else {
      const int row = (w.first_block + walk.block) * Tile::kBlockM;
      if constexpr (Tile::kDropout) walk.head = w.head * p.group + walk.member;
      if (++walk.block == w.blocks) {
        walk.block = 0;
        if constexpr (Tile::kDropout) ++walk.member;
      }
      return row;
    }
  }

  // Applies a dense mask or the softcap. Returns the factor that the scores still need.
  __device__ __forceinline__ float apply_mask(float (&s)[kScoreRegs], const Mask& mask) const {
    if constexpr (Tile::kMasked) {
      if (mask.apply(s, p.scale_log2)) return 1.f;
    }
    if constexpr (Tile::kWindowed) cap_scores(s, p.window);
    return p.scale_log2;
  }

  // Applies the causal rule or the window, and hides queries past S_q, whose scores with an
  // infinite key would be NaN. Keys past S_k are not stored. `limits` are limits_of() a tile.
  template <class Limits>
  __device__ __forceinline__ void hide(float (&s)[kScoreRegs], const Limits& limits, int col0,
                                       int row0) const {
    if constexpr (Tile::kWindowed) return hide_queries(s, p.window, col0, row0, limits.S_q);
    const bool below_diagonal = !p.is_causal || row0 >= col0 + accumulator_warp_row() + 15;
    if (below_diagonal && row0 + Tile::kBlockM <= limits.S_q) return;
    const int query = row0 + accumulator_col();
    const int last = limits.S_q - 1 - query;
    const int first = p.is_causal ? col0 + accumulator_row() - query : -Tile::kBlockM;
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) {
      const int col = i / 4 * 8 + i % 2;
      if (col > last || col < first + i / 2 % 2 * 8) s[i] = -INFINITY;
    }
  }
};

}  // namespace warpwright
