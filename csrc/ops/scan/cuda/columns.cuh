// Scans along a dimension that is not contiguous. A thread holds 8 rows of one vector of columns;
// threads of a block lie side by side over columns and below each other over rows.
#pragma once

#include "device/access.cuh"
#include "device/flagged.cuh"
#include "device/ticket.cuh"
#include "device/vec.cuh"
#include "ops/scan/cuda/operators.cuh"
#include "ops/scan/scan.h"

namespace warpwright {

// Of a tile. Memory that is zeroed before the launch says kNothing.
enum TileState : int { kNothing = 0, kTotal = 1, kCarry = 2 };  // kCarry: that after the tile

template <class T, int kInputs>
struct ColumnOperands {
  const T* input[kInputs];
  T* output;
  const T* initial;       // (outer, inner), or null: zero
  bool is_shifted;        // each step has the gate of the step before it in the scan
  int64_t length, inner;  // (outer, length, inner), dense
  int64_t vectors;        // of columns: outer * inner / kVec
  int64_t column_blocks;  // tiles across
  int log_across;         // of the threads across
  bool is_reversed;
  int* states;    // with look-back: a TileState per tile, zeroed, row of tiles by row
  int* ticket;    // with look-back: zeroed
  void* totals;   // with look-back: kWords Carry per tile row and column
  void* carries;  // with look-back: one Carry per tile row and column
};

// The nearest tile row above `tile_row` >= 1 whose carry is known, once the totals of all tile rows
// in between are there. `states` is that of tile row 0. One whole warp calls: each lane reads one
// of the 32 tile rows above.
__device__ __forceinline__ int nearest_carry(const int* states, int tile_row,
                                             int64_t column_blocks) {
  const int row = tile_row - 1 - static_cast<int>(threadIdx.x % kWarpSize);
  for (;;) {
    const int state = row >= 0 ? acquire_flag(states + row * column_blocks) : int{kNothing};
    const unsigned carries = __ballot_sync(kFullMask, state == kCarry);
    const unsigned missing = __ballot_sync(kFullMask, state == kNothing);
    if (carries == 0) continue;
    const int nearest = __ffs(static_cast<int>(carries)) - 1;
    if ((missing & ((1u << nearest) - 1)) == 0) return tile_row - 1 - nearest;
  }
}

// Publishes the tile's totals, which the last threads of each column hold in `runs`, looks back,
// and publishes the carries after the tile. The carries into it go to `into_tile`. All threads
// call; a thread has whole columns.
template <class Scan, int kVec, class Operands>
__device__ __forceinline__ void pass_carries(
    const Operands& o, int64_t index,
    const typename Scan::Element (&runs)[kVec][kScanColumnThreads],
    typename Scan::Compute (&into_tile)[kVec][kScanColumnThreads]) {
  using Carry = typename Scan::Carry;
  __shared__ int shared_found;
  const int tile_row = static_cast<int>(index / o.column_blocks);
  const int64_t column_block = index - tile_row * o.column_blocks;
  const int across = 1 << o.log_across;
  const int64_t columns = o.vectors * kVec, first = (column_block << o.log_across) * kVec;
  const int own = static_cast<int>(min(int64_t{across} * kVec, columns - first));
  auto* totals = static_cast<Carry*>(o.totals);
  auto* carries = static_cast<Carry*>(o.carries);
  int* state = o.states + index;
  auto words_of = [&](int c, Carry(&words)[Scan::kWords]) {
    Scan::total(runs[c % kVec][kScanColumnThreads - across + c / kVec], words);
  };
  for (int c = threadIdx.x; c < own; c += kScanColumnThreads) {
    Carry words[Scan::kWords];
    words_of(c, words);
#pragma unroll
    for (int w = 0; w < Scan::kWords; ++w) {
      totals[(int64_t{tile_row} * Scan::kWords + w) * columns + first + c] = words[w];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_found = -1;
    if (tile_row > 0) {
      __threadfence();
      release_flag(state, kTotal);
    }
  }
  if (threadIdx.x < kWarpSize && tile_row > 0) {
    const int nearest = nearest_carry(o.states + column_block, tile_row, o.column_blocks);
    __threadfence();
    if (threadIdx.x == 0) shared_found = nearest;
  }
  __syncthreads();
  const int found = shared_found;
  for (int c = threadIdx.x; c < own; c += kScanColumnThreads) {
    Carry carry = Scan::first_carry(), words[Scan::kWords];
    if constexpr (Scan::kHasGates) {
      if (found < 0 && o.initial != nullptr) carry = convert<Carry>(o.initial[first + c]);
    }
    if (found >= 0) carry = __ldcg(carries + found * columns + first + c);
#pragma unroll 4
    for (int64_t t = found + 1; t < tile_row; ++t) {
#pragma unroll
      for (int w = 0; w < Scan::kWords; ++w) {
        words[w] = __ldcg(totals + (t * Scan::kWords + w) * columns + first + c);
      }
      carry = Scan::advance(carry, words);
    }
    into_tile[c % kVec][c / kVec] = static_cast<typename Scan::Compute>(carry);
    words_of(c, words);
    carries[int64_t{tile_row} * columns + first + c] = Scan::advance(carry, words);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    release_flag(state, kCarry);
  }
}

// What one thread holds: rows of one vector of columns.
template <int kVec, int kRows>
struct ColumnPart {
  int64_t vector, first_row;  // in the order of the scan
  int rows;                   // at most kRows; 0 outside of the tensor
  int64_t offset, row_pitch;  // of the first row, and from a row to the next

  template <class Operands>
  __device__ static ColumnPart find(const Operands& o, int64_t index) {
    const int64_t tile_row = index / o.column_blocks;
    const int64_t column_block = index - tile_row * o.column_blocks;
    const int down = kScanColumnThreads >> o.log_across;
    const int column = threadIdx.x & ((1 << o.log_across) - 1);
    ColumnPart part;
    part.vector = (column_block << o.log_across) + column;
    part.first_row = (tile_row * down + (threadIdx.x >> o.log_across)) * kRows;
    const int64_t rows = min(o.length - part.first_row, int64_t{kRows});
    part.rows = part.vector < o.vectors ? static_cast<int>(rows) : 0;
    const int64_t per_outer = o.inner / kVec;
    const int64_t outer = part.vector / per_outer;
    const int64_t row = o.is_reversed ? o.length - 1 - part.first_row : part.first_row;
    part.offset = (outer * o.length + row) * o.inner + (part.vector - outer * per_outer) * kVec;
    part.row_pitch = o.is_reversed ? -o.inner : o.inner;
    return part;
  }
};

// Replaces each thread's runs by those of all threads above it in the block. `shared` then holds
// the runs up to each thread.
template <class Scan, int kVec>
__device__ __forceinline__ void scan_down(
    typename Scan::Element (&run)[kVec], typename Scan::Element (&shared)[kVec][kScanColumnThreads],
    int log_across) {
  const int down = kScanColumnThreads >> log_across, step = threadIdx.x >> log_across;
  for (int distance = 1; distance < down; distance *= 2) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) shared[v][threadIdx.x] = run[v];
    __syncthreads();
    if (step >= distance) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        run[v] = Scan::combine(shared[v][threadIdx.x - (distance << log_across)], run[v]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) shared[v][threadIdx.x] = run[v];
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    run[v] = step > 0 ? shared[v][threadIdx.x - (1 << log_across)] : Scan::identity();
  }
}

// Layout: inputs and output (outer, length, inner), dense. Vectors of columns are numbered over
// outer and inner.
// Grid: tile (k, c) owns rows k * rows_per_tile and so on of column vectors c << log_across and so
// on. Tiles are taken row by row: block b, or with look-back the ticket, is k * column_blocks + c.
template <class T, class Scan, int kVec, bool kLookBack>
__global__ void __launch_bounds__(kScanColumnThreads, Scan::kBlocksPerSm)
    scan_columns_kernel(const __grid_constant__ ColumnOperands<T, Scan::kInputs> o) {
  constexpr int kInputs = Scan::kInputs;
  constexpr int kRows = kScanColumnRows / Scan::kNumbers;
  using Compute = typename Scan::Compute;
  using Element = typename Scan::Element;
  __shared__ Element shared_runs[kVec][kScanColumnThreads];
  __shared__ int shared_word;

  int64_t index = blockIdx.x;
  if constexpr (kLookBack) {
    if (threadIdx.x == 0) shared_word = take_ticket(o.ticket);
    __syncthreads();
    index = shared_word;
  }
  const auto part = ColumnPart<kVec, kRows>::find(o, index);

  Vec<T, kVec> loaded[kInputs][kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) loaded[i][r][v] = convert<T>(Scan::read_identity(i));
      int step_back = 0;
      bool is_read = r < part.rows;
      if (Scan::kHasGates && i == 1) {
        step_back = o.is_shifted ? 1 : 0;
        is_read = is_read && (Scan::kHasLevels || part.first_row + r > 0 || o.initial != nullptr);
      }
      if (is_read) {
        loaded[i][r] = load_vec<kVec>(o.input[i] + part.offset + (r - step_back) * part.row_pitch);
      }
    }
  }
  [[maybe_unused]] Vec<T, kVec> level_before;  // a column's first level has itself before it
  if constexpr (Scan::kHasLevels) {
    level_before = loaded[1][0];
    if (part.rows > 0 && part.first_row > 0) {
      level_before = load_vec<kVec>(o.input[1] + part.offset - part.row_pitch);
    }
  }
  auto element = [&](int r, int v) {
    Compute inputs[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) inputs[i] = widen_for_scan<Compute>(loaded[i][r])[v];
    if constexpr (Scan::kHasLevels) {
      const auto& before = r > 0 ? loaded[1][r > 0 ? r - 1 : 0] : level_before;
      inputs[1] = Scan::gate(widen_for_scan<Compute>(before)[v], inputs[1]);
    }
    return Scan::element(inputs);
  };

  Element run[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    run[v] = element(0, v);
#pragma unroll
    for (int r = 1; r < kRows; ++r) run[v] = Scan::combine(run[v], element(r, v));
  }
  scan_down<Scan, kVec>(run, shared_runs, o.log_across);

  [[maybe_unused]] Compute into_tile[kVec];
  if constexpr (kLookBack) {
    __shared__ Compute shared_carries[kVec][kScanColumnThreads];
    pass_carries<Scan, kVec>(o, index, shared_runs, shared_carries);
    const int column = threadIdx.x & ((1 << o.log_across) - 1);
#pragma unroll
    for (int v = 0; v < kVec; ++v) into_tile[v] = shared_carries[v][column];
  } else if constexpr (Scan::kHasGates) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const bool has_state = o.initial != nullptr && part.vector < o.vectors;
      into_tile[v] = has_state ? convert<Compute>(o.initial[part.vector * kVec + v]) : Compute{};
    }
  }

  forget(loaded);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Vec<T, kVec> result;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      run[v] = Scan::combine(run[v], element(r, v));
      if constexpr (kLookBack || Scan::kHasGates) {
        result[v] = convert<T>(Scan::result(into_tile[v], run[v]));
      } else {
        result[v] = convert<T>(Scan::result(run[v]));
      }
    }
    if (r < part.rows) store_vec_global(o.output + part.offset + r * part.row_pitch, result);
  }
}

}  // namespace warpwright
