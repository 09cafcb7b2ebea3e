// What a CTA of the kernel of tiles (tiled_sm90.cuh) multiplies, and how its stages are loaded.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "ops/linear_quantized/linear_quantized.h"

namespace warpwright {

struct TiledParams {
  LinearQuantizedParams call;
  // Boxes. codes, y: a unit of the tile's features; dx: up to 2 KB of four blocks. scales, zeros:
  // one unit's. tokens: 64 along the sum of `box_tokens`. output: 64 columns of its tokens, or
  // of 16 tokens in a cluster.
  CUtensorMap codes, scales, zeros, tokens, output;
  TiledMemory memory;
  int depth, ranks;
  int token_tiles, column_tiles;
  int units;   // of 64 along the sum
  int rounds;  // of whole tiles
  // Units of a CTA's part of the other tiles, and the number of parts that have one more. In a
  // cluster: of a rank's part of the tile.
  int each, extra;
  int box_tokens;          // at most 64: a tile has as many boxes as hold its tokens
  int scale_rows;          // per stage
  uint32_t group_divisor;  // 2^32 / units per group, rounded up, or 0: a group has one unit at most
  int rows_per_unit;       // of scales, where a group has one unit at most
  int* flags;              // (CTAs, warpgroups): set when the part is written
  float* parts;            // (CTAs, warpgroups, accumulators of the threads)
};

// How CTAs share the sums of tiles: not at all, by parts of the row of units, or as a cluster.
enum class TiledSharing { kNone, kParts, kCluster };

// Units of one tile.
struct TiledSegment {
  int tile, first, count;
};

// The segments of a CTA. First come its whole tiles, each gridDim.x after the other, so that the
// CTAs walk along the sum in step and read neighbouring tiles. The units of the tiles that follow
// are cut into equal parts, one per CTA.
//
// A part that begins inside of a tile leaves its sums of that tile to the CTA whose part has the
// tile's beginning. That CTA waits for parts of later units. They belong to CTAs of lower index,
// which have started before, and a CTA begins with the units that others wait for. So the wait ends
// even if not all CTAs are resident.
template <TiledSharing kSharing>
struct TiledWalk {
  static constexpr bool kCluster = kSharing == TiledSharing::kCluster;
  const TiledParams& p;
  int round = 0;
  int at, end;

  __device__ __forceinline__ static int begin_of(const TiledParams& p, int part) {
    return p.each * part + min(part, p.extra);
  }
  __device__ __forceinline__ static int part(const TiledParams& p) {
    return static_cast<int>(kCluster ? blockIdx.x % static_cast<unsigned>(p.ranks)
                                     : gridDim.x - 1 - blockIdx.x);
  }
  __device__ __forceinline__ explicit TiledWalk(const TiledParams& params)
      : p(params), at(begin_of(p, part(p))), end(begin_of(p, part(p) + 1)) {}

  __device__ __forceinline__ bool next(TiledSegment& segment) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    if constexpr (kCluster) {
      segment = {block / p.ranks, at, end - at};
      return round++ == 0;
    }
    if (kSharing == TiledSharing::kNone || round < p.rounds) {
      segment = {round * blocks + block, 0, p.units};
      ++round;
      return segment.tile < p.token_tiles * p.column_tiles;
    }
    if (at >= end) return false;
    const int first = at % p.units;
    segment = {p.rounds * blocks + at / p.units, first, min(p.units - first, end - at)};
    at += segment.count;
    return true;
  }
};

template <int kBits, bool kGradient, int kGroups>
struct TiledCta {
  static constexpr int kColumns = kGroups * 64, kBlocks = kColumns / 16;
  static constexpr int kBlockBytes = static_cast<int>(tiled_block_bytes(kBits));
  // dx: a box has as many units of k as fit 2 KB, of four blocks of features.
  static constexpr int kBoxBytes = kGroups * kBlockBytes < 2048 ? kGroups * kBlockBytes : 2048;
  static constexpr int kBoxUnits = kBoxBytes / kBlockBytes;

  const TiledParams& p;
  uint32_t shared;

  __device__ __forceinline__ uint32_t full(int index) const {
    return shared + static_cast<uint32_t>(p.memory.barriers) + index * 16;
  }
  __device__ __forceinline__ uint32_t empty(int index) const { return full(index) + 8; }

  // Tiles of tokens that read the same codes are neighbours.
  __device__ __forceinline__ int columns(int tile) const { return tile / p.token_tiles; }
  __device__ __forceinline__ int tokens(int tile) const { return tile % p.token_tiles; }

  // The first row of scales of unit `k` of the weight's k.
  __device__ __forceinline__ int scale_row(int k) const {
    return p.group_divisor != 0
               ? static_cast<int>(__umulhi(static_cast<uint32_t>(k), p.group_divisor))
               : k * p.rows_per_unit;
  }

  // Boxes that hold the tokens of a tile. TMA fills what has no tokens with zeros slowly.
  __device__ __forceinline__ int boxes(int tile, int tokens_per_tile) const {
    const int64_t rest = p.call.rows - int64_t{tokens(tile)} * tokens_per_tile;
    const int count = static_cast<int>(min(rest, int64_t{tokens_per_tile}));
    return (count + p.box_tokens - 1) / p.box_tokens;
  }

  // Starts the loads of a stage's codes, scales and zeros, and expects all bytes of the stage.
  __device__ __forceinline__ void load_weight(int at, int tile, int unit, int token_boxes) const {
    const uint32_t barrier = full(at);
    mbarrier_arrive_expect_tx(
        barrier, static_cast<uint32_t>(p.memory.bytes - p.memory.codes + p.memory.scale_bytes +
                                       token_boxes * p.box_tokens * 128));
    const uint32_t codes = shared + at * p.memory.bytes + p.memory.codes;
    const int column = columns(tile);
    if constexpr (kGradient) {
#pragma unroll
      for (int box = 0; box < kGroups / kBoxUnits; ++box) {
        tma_load_2d(codes + box * 4 * kBoxBytes, &p.codes,
                    (column * kGroups / kBoxUnits + box) * (kBoxBytes / 8), unit * 4, barrier);
      }
    } else {
      tma_load_2d(codes, &p.codes, unit * (kBlockBytes / 8), column * kBlocks, barrier);
    }
    if (p.scale_rows == 0) return;
    const uint32_t scales = shared + p.memory.scales + at * p.memory.scale_stride;
    const int feature = kGradient ? unit * static_cast<int>(kTiledK) : column * kColumns;
    const int row = scale_row(kGradient ? column * kGroups : unit);
    tma_load_2d(scales, &p.scales, feature / 4, row, barrier);
    if (p.call.weight.zeros == nullptr) return;
    tma_load_2d(scales + p.memory.zeros, &p.zeros, feature / 8, row, barrier);
  }
  __device__ __forceinline__ void load_tokens(int at, int first_token, int unit,
                                              int token_boxes) const {
    for (int box = 0; box < token_boxes; ++box) {
      const int token = box * p.box_tokens;
      tma_load_2d(shared + at * p.memory.bytes + token * 128, &p.tokens, unit * 64,
                  first_token + token, full(at));
    }
  }
};

// All stages of a CTA, by one thread. With `ahead` the first two stages of codes load before the
// previous kernel ends. More codes would delay the first stage's tokens.
template <TiledSharing kSharing, int kTokens, int kBits, bool kGradient, int kGroups>
__device__ __forceinline__ void load_stages(const TiledCta<kBits, kGradient, kGroups>& cta) {
  const TiledParams& p = cta.p;
  TiledSegment segment;
  int early = 0;
  if (p.call.ahead) {
    TiledWalk<kSharing> walk(p);
    if (walk.next(segment)) early = min(2, segment.count);
    for (int i = 0; i < early; ++i) {
      cta.load_weight(i, segment.tile, segment.first + i, cta.boxes(segment.tile, kTokens));
    }
  }
  wait_for_previous_kernel();
  TiledWalk<kSharing> walk(p);
  int at = 0;
  uint32_t parity = 1;  // all stages are empty
  while (walk.next(segment)) {
    const int first_token = cta.tokens(segment.tile) * kTokens;
    const int boxes = cta.boxes(segment.tile, kTokens);
    for (int i = 0; i < segment.count; ++i) {
      mbarrier_wait(cta.empty(at), parity);
      if (--early < 0) cta.load_weight(at, segment.tile, segment.first + i, boxes);
      cta.load_tokens(at, first_token, segment.first + i, boxes);
      if (++at == p.depth) at = 0, parity ^= 1;
    }
  }
}

}  // namespace warpwright
