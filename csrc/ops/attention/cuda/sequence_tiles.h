// The list of tiles of packed sequences, which a kernel makes from the sequences' ends.
//
// Sequences with the most work come first, so that only short tiles remain at the end. Within a
// sequence, heads come in sections whose keys (or queries) stay in L2, and within a section the
// longest tiles come first.
#pragma once

#include <cstdint>

#include "common/error_record.h"
#include "ops/attention/varlen.h"

namespace warpwright {

// A tile of some rows of one sequence, for the heads of a section from `head` on.
struct alignas(16) SequenceTile {
  int row0;          // within the sequence
  int head;          // the first head of the section
  int S_q, S_k;      // of the sequence
  int q_end, k_end;  // its end among all queries and keys
  int stats;         // packed_stats_begin() of its queries
  int unused;
};
static_assert(sizeof(SequenceTile) == 32);

// The list as the kernels get it.
struct SequenceTileList {
  SequenceListPlan plan;
  bool of_queries;
  bool longest_is_last;  // the last rows of a sequence have the most work, else the first rows
  SequenceTile* tiles;   // plan.max_tiles
  int* num_tiles;        // (1): tiles, for each head of a section one
};

#ifdef WARPWRIGHT_WITH_CUDA
// Results of rows that belong to no sequence: zeros, and -inf as the log-sum-exp.
struct SequenceGaps {
  struct Rows {
    void* data = nullptr;   // contiguous, aligned to 16 bytes; null: none
    int64_t row_bytes = 0;  // even
    bool of_queries = true;
  };
  Rows results[3];
  void* lse = nullptr;  // (lse_heads, total_q), or null
  int64_t lse_heads = 0;
  bool lse_is_double = false;
};

struct SequenceTilesArgs {
  PackedSequences sequences;
  int64_t total_q, total_k;
  SequenceTileList lists[2];
  int num_lists;
  int* counters;  // (kAttentionTileCounters): cleared
  SequenceGaps gaps;
  VarlenErrors errors;
};

// Makes the lists, clears the counters and fills the gaps. If the ends are not ascending within the
// rows, or a sequence is longer than its maximum, it reports that, the lists are empty, and all
// results are NaN.
void launch_sequence_tiles(const SequenceTilesArgs& args, cudaStream_t stream);

// The lists of a call in its workspace.
inline SequenceTileList sequence_list(const VarlenPlan& plan, int list, void* workspace) {
  char* base = static_cast<char*>(workspace);
  return {.plan = list == 0 ? plan.queries : plan.keys,
          .of_queries = list == 0,
          .longest_is_last = list == 0,
          .tiles = reinterpret_cast<SequenceTile*>(base + plan.workspace.tiles[list]),
          .num_tiles = reinterpret_cast<int*>(base + plan.workspace.count[list])};
}
#endif

}  // namespace warpwright
