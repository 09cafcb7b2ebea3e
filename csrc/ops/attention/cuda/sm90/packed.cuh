// Packed sequences in the sm_90a kernels: rows of one sequence by TMA, and what a tile knows of its
// sequence. A tile of the kernels in this folder becomes one of packed sequences by PackedTile.
#pragma once

#include "device/sm90/tma_5d.cuh"
#include "host/tensor_map_ragged.h"
#include "ops/attention/cuda/sequence_tiles.h"
#include "ops/attention/cuda/sm90/params.cuh"
#include "ops/attention/cuda/sm90/tile_queue.cuh"

namespace warpwright {

// ---- rows of a sequence by TMA ----

// A map of host/tensor_map_ragged.h. The sequence's last row is the one before row `end` of all.
struct RaggedRows {
  int length, end;
};

// load_row_tile() and store_row_tile() of sm90/tile.cuh for rows of a sequence. Rows past its end
// read as zero and are not written.
template <int kChunks, int kRows>
__device__ __forceinline__ void load_row_tile(uint32_t to, const CUtensorMap* map, int row0, int h,
                                              const RaggedRows& rows, uint32_t barrier) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    tma_load_5d(to + chunk * kRows * 128, map, chunk * 64, kRaggedEnd - rows.length + row0, h,
                rows.end, kRaggedEnd, barrier);
}
template <int kChunks, int kRows>
__device__ __forceinline__ void store_row_tile(const CUtensorMap* map, uint32_t from, int row0,
                                               int S, int D, int h, const RaggedRows& rows,
                                               int first = 0) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    if ((first + chunk) * 64 < D && row0 < S)
      tma_store_5d(map, (first + chunk) * 64, kRaggedEnd - rows.length + row0, h, rows.end,
                   kRaggedEnd, from + chunk * kRows * 128);
}

// ---- tiles ----

// How the tiles reach the warpgroups. A consumer holds its slot until it has finished the tile, so
// that it reads again what its registers have no room for.
struct SequenceQueue {
  static constexpr int kSlots = 2;
  static constexpr int kTileBytes = sizeof(SequenceTile);
  static constexpr int kSmemBytes = StageRing<kSlots>::kBarrierBytes + kTileBytes * kSlots;
  static constexpr int kNoTile = -1;

  uint32_t shared;                      // kSmemBytes, a multiple of 16
  StageRing<kSlots>::Cursor at = {};    // the next slot that is pushed or popped
  StageRing<kSlots>::Cursor held = {};  // a consumer's: the next that it hands back

  __device__ __forceinline__ StageRing<kSlots> ring() const { return {shared}; }
  __device__ __forceinline__ void init(int consumer_warps) const { ring().init(consumer_warps); }

  // The producer's. A tile of all heads has a number; entry number / section of the list has its
  // rows.
  template <class Params>
  __device__ __forceinline__ bool holds(const Params& p, int number) const {
    return number < *p.sequences.num_tiles;
  }
  // Passes the tile on and returns the address of its slot.
  template <class Params>
  __device__ __forceinline__ int push(const Params& p, int number) {
    int entry, in_section;
    p.schedule.by_heads.divmod(number, entry, in_section);
    const bool found = holds(p, number);
    uint4 low = {}, high = {};
    if (found) {
      const uint4* from = reinterpret_cast<const uint4*>(p.sequences.tiles + entry);
      low = from[0], high = from[1];
    }
    low.y = found ? low.y + in_section : static_cast<uint32_t>(kNoTile);
    ring().wait_empty(at);
    const uint32_t to = slot();
    store_shared_u128(to, low);
    store_shared_u128(to + 16, high);
    mbarrier_arrive(ring().full(at.stage));
    at.next();
    return static_cast<int>(to);
  }
  __device__ __forceinline__ int next(const TileSchedule& schedule, int number) const {
    if (schedule.counter == nullptr) return number + static_cast<int>(gridDim.x);
    return static_cast<int>(gridDim.x) + take_ticket(schedule.counter);
  }

  // A consumer warp's: the slot of the next tile, or kNoTile.
  __device__ __forceinline__ int pop() {
    ring().wait_full(at);
    const uint32_t from = slot();
    at.next();
    return static_cast<int>(load_shared_u32(from + 4)) == kNoTile ? kNoTile
                                                                  : static_cast<int>(from);
  }
  template <class Params>
  __device__ __forceinline__ bool popped(const Params&, int tile) const {
    return tile != kNoTile;
  }
  // Hands the slot of the oldest tile back that it still holds.
  __device__ __forceinline__ void finish() {
    __syncwarp();
    ring().release(held);
    held.next();
  }

 private:
  __device__ __forceinline__ uint32_t slot() const {
    return shared + StageRing<kSlots>::kBarrierBytes + at.stage * kTileBytes;
  }
};

// A tile of the fixed-length kernels, for packed sequences.
template <class Tile>
struct PackedTile : Tile {
  static constexpr bool kPacked = true;
  static constexpr bool kMayBeEmpty = true;
  static constexpr int kSmemBytes =
      Tile::kSmemBytes - TileQueue::kSmemBytes + SequenceQueue::kSmemBytes;
  static_assert(kSmemBytes <= 227 * 1024);
};
template <class Tile>
using QueueOf = std::conditional_t<is_packed<Tile>, SequenceQueue, TileQueue>;

// ---- what a tile knows of its sequence ----

// The part of a tile's work that only packed sequences have.
struct FixedLength {};
struct OfSequence {
  int S_q, S_k, q_end, k_end;
  int stats;  // the sequence's first row in the statistics of a head
  // Query i sees what query i + shift would see if the first query and the first key were at the
  // same position. So the last ones are.
  __device__ __forceinline__ int shift() const { return S_k - S_q; }
};
template <class Tile>
using SequenceOf = std::conditional_t<is_packed<Tile>, OfSequence, FixedLength>;

__device__ __forceinline__ SequenceTile read_sequence_tile(int slot) {
  const uint4 low = load_shared_u128(static_cast<uint32_t>(slot));
  const uint4 high = load_shared_u128(static_cast<uint32_t>(slot) + 16);
  SequenceTile tile;
  tile.row0 = static_cast<int>(low.x), tile.head = static_cast<int>(low.y);
  tile.S_q = static_cast<int>(low.z), tile.S_k = static_cast<int>(low.w);
  tile.q_end = static_cast<int>(high.x), tile.k_end = static_cast<int>(high.y);
  tile.stats = static_cast<int>(high.z);
  return tile;
}

// Where the rows of queries, or keys, of a tile are: the batch, or the rows of its sequence.
template <class Work>
__device__ __forceinline__ auto queries_of(const Work& w) {
  if constexpr (requires { w.q_end; })
    return RaggedRows{w.S_q, w.q_end};
  else
    return w.b;
}
template <class Work>
__device__ __forceinline__ auto keys_of(const Work& w) {
  if constexpr (requires { w.k_end; })
    return RaggedRows{w.S_k, w.k_end};
  else
    return w.b;
}
// What hides scores of a tile.
struct SequenceLimits {
  int S_q, S_k;
  bool is_causal;
};
struct SequenceWindow {
  int S_q, S_k;
  const AttentionWindowSm90& window;
};
template <class Params, class Work>
__device__ __forceinline__ decltype(auto) limits_of(const Params& p, const Work& w) {
  if constexpr (!requires { w.q_end; })
    return (p);
  else if constexpr (requires { p.window; })
    return SequenceWindow{w.S_q, w.S_k, p.window};
  else
    return SequenceLimits{w.S_q, w.S_k, p.is_causal};
}
template <class Work>
__device__ __forceinline__ int shift_of(const Work& w) {
  if constexpr (requires { w.q_end; })
    return w.shift();
  else
    return 0;
}
// The element of query `row` in the log-sum-exp of head w.head.
template <class Params, class Work>
__device__ __forceinline__ int64_t lse_index(const Params& p, const Work& w, int row) {
  if constexpr (requires { w.q_end; })
    return int64_t{w.head} * p.sequences.total_q + (w.q_end - w.S_q + row);
  else
    return int64_t{w.head} * p.S_q + row;
}
// The statistic of query 0 of head w.head, or of a member of its group.
template <class Params, class Work>
__device__ __forceinline__ int64_t stats_index(const Params& p, const Work& w) {
  if constexpr (requires { w.q_end; })
    return int64_t{w.head} * p.padded_rows + w.stats;
  else
    return int64_t{w.head} * p.padded_rows;
}
template <class Params, class Work>
__device__ __forceinline__ int64_t member_stats_index(const Params& p, const Work& w, int member) {
  if constexpr (requires { w.q_end; })
    return int64_t{w.head * p.group + member} * p.padded_rows + w.stats;  // heads fit 32 bits
  else
    return (int64_t{w.head} * p.group + member) * p.padded_rows;
}

}  // namespace warpwright
