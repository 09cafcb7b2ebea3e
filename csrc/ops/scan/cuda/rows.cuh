// Scans along the contiguous dimension. The threads of a block hold a tile in
// registers: it is read once and written once.
#pragma once

#include "device/access.cuh"
#include "device/math.cuh"
#include "device/ticket.cuh"
#include "device/vec.cuh"
#include "ops/scan/cuda/look_back.cuh"
#include "ops/scan/cuda/operators.cuh"
#include "ops/scan/scan.h"

namespace warpwright {

template <class T, int kInputs>
struct RowOperands {
  const T* input[kInputs];
  T* output;
  const T* initial;       // (rows), or null: zero
  bool is_shifted;        // each step has the gate of the step before it in the scan
  int64_t rows, length;   // row-major, dense
  bool vectorized;        // inputs lie as the output does between 16-byte boundaries
  int rows_per_tile;      // without look-back
  FastDivmod by_length;   // without look-back
  int64_t tiles_per_row;  // with look-back
  Flagged* words;         // with look-back: of all tiles, then of all groups, zeroed
  int* ticket;            // with look-back: zeroed
};

template <class Scan, class Operands>
__device__ __forceinline__ RowWords<Scan> words_of_row(const Operands& o, int64_t row) {
  const int64_t groups = ceil_div(o.tiles_per_row, int64_t{kScanGroup});
  Flagged* of_groups = o.words + o.rows * o.tiles_per_row * Scan::kWords;
  return {o.words + row * o.tiles_per_row * Scan::kWords,
          of_groups + row * groups * (Scan::kWords + 1)};
}

// Where a tile lies. Positions count elements in the order of the scan over the whole tensor, which
// a reversed scan walks from its last element. Lanes are placed from `origin` on, which is an
// address of 16 bytes; the tile's elements are those from `origin + low` to `origin + high`.
struct TilePlace {
  int64_t begin;  // of the tile's first row
  int64_t origin;
  int low, high;
};

// How tiles cut the rows.
enum class RowKind {
  kLong,      // a row has several tiles, which look back
  kVectors,   // a tile has whole rows of whole vectors
  kElements,  // a tile has whole rows, which begin anywhere
};
// Long rows: Scan::kBlocksPerSm blocks of 256 threads, for three of them 80 registers. Whole rows:
// two of 512, 64 registers.
constexpr int row_threads(RowKind kind) { return kind == RowKind::kLong ? 256 : 512; }

template <class T, class Scan, bool kReverse, RowKind kKind>
struct RowTile {
  static constexpr bool kLookBack = kKind == RowKind::kLong;
  static constexpr int kThreads = row_threads(kKind);
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kInputs = Scan::kInputs;
  static constexpr int kRounds = kScanRowBytes / (Scan::kNumbers * kThreads * kVecBytes);
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kSize = kThreads * kRounds * kVec;  // elements
  using Compute = typename Scan::Compute;
  using Element = typename Scan::Element;
  using Operands = RowOperands<T, kInputs>;

  const Operands& operands;
  TilePlace place;
  Vec<T, kVec> loaded[kInputs][kRounds];
  Accum<T> level_before[Scan::kHasLevels ? kRounds : 1];  // the step before each vector

  __device__ static TilePlace find_place(const Operands& o, int64_t tile) {
    int64_t begin, end, skipped = 0;
    if constexpr (kLookBack) {
      const int64_t row = tile / o.tiles_per_row;
      begin = row * o.length;
      end = begin + o.length;
      skipped = (tile - row * o.tiles_per_row) * kSize;
    } else {
      begin = tile * o.rows_per_tile * o.length;
      end = min(begin + o.rows_per_tile * o.length, o.rows * o.length);
    }
    // The elements from the last 16-byte boundary, in the order of the scan, to the first element.
    const T* first = o.output + (kReverse ? o.rows * o.length - begin : begin);
    const int over = static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVecBytes / sizeof(T));
    const int phase = kReverse ? (kVec - over) % kVec : over;
    const int64_t origin = begin - phase + skipped;
    return {begin, origin, static_cast<int>(max(begin - origin, int64_t{0})),
            static_cast<int>(max(min(end - origin, int64_t{kSize}), int64_t{0}))};
  }

  // Of this thread's vector of a round, from the tile's origin. A warp owns adjacent rounds.
  // Recomputed by each pass: addresses and conditions of all rounds would take the registers.
  __device__ static int offset_of(int round) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    return derive_anew(((warp * kRounds + round) * kWarpSize + lane) * kVec);
  }
  // The first address of the vector at `offset`, whose elements a reversed scan takes backwards.
  template <class Pointer>
  __device__ Pointer address(Pointer data, int offset) const {
    const int64_t position = place.origin + offset;
    return data + (kReverse ? operands.rows * operands.length - kVec - position : position);
  }
  __device__ static int in_memory(int j) { return kReverse ? kVec - 1 - j : j; }

  __device__ void load() {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int offset = offset_of(r);
      const bool is_whole =
          operands.vectorized && offset >= place.low && offset + kVec <= place.high;
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        const T* source = address(operands.input[i], offset);
        if (is_whole) {
          loaded[i][r] = load_vec<kVec>(source);
        } else {
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            const bool is_inside = offset + j >= place.low && offset + j < place.high;
            loaded[i][r][in_memory(j)] =
                is_inside ? source[in_memory(j)] : convert<T>(Scan::read_identity(i));
          }
        }
      }
    }
    if constexpr (Scan::kHasLevels) {
      find_levels_before();
    } else if constexpr (Scan::kHasGates) {
      if (operands.is_shifted) shift_gates();
      if (kLookBack && operands.initial == nullptr) open_first_gate();
    }
  }

  // A row's first level has itself before it. In a tile of whole rows its gate is of no use.
  __device__ void find_levels_before() {
    const int lane = threadIdx.x % kWarpSize;
    auto& levels = loaded[1];
    if (kLookBack && threadIdx.x == 0 && place.origin <= place.begin) {
#pragma unroll
      for (int j = kVec - 1; j > 0; --j) {
        if (j <= place.low) levels[0][in_memory(j - 1)] = levels[0][in_memory(j)];
      }
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int offset = offset_of(r) - 1;
      const T last = __shfl_up_sync(kFullMask, levels[r][in_memory(kVec - 1)], 1);
      level_before[r] = convert<Accum<T>>(last);
      if (lane != 0) continue;
      const bool is_in_row = place.origin + offset >= place.begin && offset < place.high;
      level_before[r] =
          convert<Accum<T>>(is_in_row ? *(address(operands.input[1], offset) + in_memory(0))
                                      : levels[r][in_memory(0)]);
    }
  }

  // Before a row's first step there is no state, whatever the gate.
  __device__ void open_first_gate() {
    if (place.origin > place.begin) return;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int offset = offset_of(r);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (offset + j == place.low) loaded[1][r][in_memory(j)] = convert<T>(Compute{1});
      }
    }
  }

  // Each element of the gates becomes the one before it in the scan. A row's first gate is of no
  // use: no state comes before it.
  __device__ void shift_gates() {
    const int lane = threadIdx.x % kWarpSize;
    T first[kRounds];  // of lane 0
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int offset = offset_of(r) - 1;
      first[r] = convert<T>(Scan::read_identity(1));
      if (lane == 0 && place.origin + offset >= place.begin && offset < place.high) {
        first[r] = *(address(operands.input[1], offset) + in_memory(0));
      }
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const T left = __shfl_up_sync(kFullMask, loaded[1][r][in_memory(kVec - 1)], 1);
#pragma unroll
      for (int j = kVec - 1; j > 0; --j) {
        loaded[1][r][in_memory(j)] = loaded[1][r][in_memory(j - 1)];
      }
      loaded[1][r][in_memory(0)] = lane == 0 ? first[r] : left;
    }
  }

  // The state before a row that begins at `offset`.
  __device__ Compute initial_state(int offset) const {
    if (operands.initial == nullptr || offset >= place.high) return 0;
    const int64_t row = (place.origin + offset) / operands.length;
    return convert<Compute>(operands.initial[kReverse ? operands.rows - 1 - row : row]);
  }

  __device__ typename Scan::Carry state_before_row() const {
    if constexpr (Scan::kHasGates) return initial_state(place.low);
    return Scan::first_carry();
  }

  __device__ void store(int round, const Vec<T, kVec>& result) const {
    const int offset = offset_of(round);
    T* target = address(operands.output, offset);
    if (offset >= place.low && offset + kVec <= place.high) {
      store_vec_global(target, result);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (offset + j >= place.low && offset + j < place.high) {
          target[in_memory(j)] = result[in_memory(j)];
        }
      }
    }
  }

  // The elements of the vector before the first that begins a row; kVec or more if none does.
  __device__ int before_row(int round) const {
    if constexpr (kLookBack) {
      return kVec;
    } else {
      const int from_begin = offset_of(round) - place.low;
      if (from_begin <= 0) return -from_begin;
      int row, column;
      operands.by_length.divmod(from_begin, row, column);
      return column == 0 ? 0 : static_cast<int>(operands.length) - column;
    }
  }

  // Calls step(j, run) for each element of the vector with the run that ends there: it begins with
  // `before`, or at a row's first element. The first one of those is element `next`.
  template <class Step>
  __device__ void walk(int round, int next, Element before, Step&& step) const {
    Vec<Compute, kVec> values[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values[i] = widen_for_scan<Compute>(loaded[i][round]);
    Element run = before;
    [[maybe_unused]] Compute level{};
    if constexpr (Scan::kHasLevels) level = convert<Compute>(level_before[round]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      Compute inputs[kInputs];
#pragma unroll
      for (int i = 0; i < kInputs; ++i) inputs[i] = values[i][in_memory(j)];
      if constexpr (Scan::kHasLevels) {
        inputs[1] = Scan::gate(level, values[1][in_memory(j)]);
        level = values[1][in_memory(j)];
      }
      const Element own = Scan::element(inputs);
      run = Scan::combine(run, own);
      if (kKind == RowKind::kElements || (kKind == RowKind::kVectors && j == 0)) {
        if (j == next) {
          run = own;
          if constexpr (Scan::kHasGates)
            run = Scan::start(initial_state(offset_of(round) + j), own);
          next += static_cast<int>(operands.length);
        }
      }
      step(j, run);
    }
  }
};

// Lanes that hold a row's first element, and what follows for this lane.
struct RowStarts {
  unsigned lanes;
  __device__ bool any() const { return lanes != 0; }
  __device__ bool before_lane() const {
    return (lanes & ((1u << (threadIdx.x % kWarpSize)) - 1)) != 0;
  }
  // The last such lane up to this one, or 0.
  __device__ int last() const {
    const unsigned up_to_lane = lanes & (0xffffffffu >> (31 - threadIdx.x % kWarpSize));
    return up_to_lane == 0 ? 0 : 31 - __clz(static_cast<int>(up_to_lane));
  }
};

// Layout: inputs and output (rows, length), dense.
// Grid: without look-back, block b owns rows_per_tile whole rows. With look-back, the block with
// ticket t owns tile t % tiles_per_row of row t / tiles_per_row.
template <class T, class Scan, bool kReverse, RowKind kKind>
__global__ void __launch_bounds__(row_threads(kKind),
                                  kKind == RowKind::kLong ? Scan::kBlocksPerSm : 2)
    scan_rows_kernel(const __grid_constant__ RowOperands<T, Scan::kInputs> operands) {
  constexpr bool kLookBack = kKind == RowKind::kLong;
  using Tile = RowTile<T, Scan, kReverse, kKind>;
  using Element = typename Scan::Element;
  using Carry = typename Scan::Carry;
  __shared__ Element shared_totals[Tile::kWarps];
  __shared__ bool shared_starts[Tile::kWarps];
  __shared__ int shared_ticket;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  int64_t index = blockIdx.x;
  if constexpr (kLookBack) {
    if (threadIdx.x == 0) shared_ticket = take_ticket(operands.ticket);
    __syncthreads();
    index = shared_ticket;
  }
  Tile tile{operands, Tile::find_place(operands, index)};
  tile.load();

  // Runs that end before this lane. A run begins at the warp's first element (then bit r of
  // `is_open` is set, for round r), or at the first element of the last row.
  Element into_lane[Tile::kRounds];
  unsigned is_open = 0;
  Element warp_total = Scan::identity();
  bool warp_starts = false;
#pragma unroll
  for (int r = 0; r < Tile::kRounds; ++r) {
    Element run;
    const int next = tile.before_row(r);
    tile.walk(r, next, Scan::identity(), [&](int, Element value) { run = value; });
    const RowStarts starts{kLookBack ? 0 : __ballot_sync(kFullMask, next < Tile::kVec)};
    const int first = starts.last();
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const Element left = shuffle_up(run, distance);
      if (lane - distance >= first) run = Scan::combine(left, run);
    }
    Element before = shuffle_up(run, 1);
    if (lane == 0) before = Scan::identity();
    const bool is_in_row = !starts.before_lane();
    into_lane[r] = is_in_row ? Scan::combine(warp_total, before) : before;
    is_open |= is_in_row && !warp_starts ? 1u << r : 0u;
    const Element total = shuffle(run, kWarpSize - 1);
    warp_total = starts.any() ? total : Scan::combine(warp_total, total);
    warp_starts |= starts.any();
  }
  forget(tile.loaded);
  if (lane == 0) {
    shared_totals[warp] = warp_total;
    shared_starts[warp] = warp_starts;
  }
  __syncthreads();

  Element into_warp = Scan::identity();
  Element tile_total = Scan::identity();
#pragma unroll
  for (int w = 0; w < Tile::kWarps; ++w) {
    if (w == warp) into_warp = tile_total;
    const Element total = shared_totals[w];
    tile_total = !kLookBack && shared_starts[w] ? total : Scan::combine(tile_total, total);
  }
  [[maybe_unused]] typename Scan::Compute into_tile{};
  if constexpr (kLookBack) {
    __shared__ Carry shared_carry;
    if (warp == 0) {
      const int64_t row = index / operands.tiles_per_row;
      Carry words[Scan::kWords];
      Scan::total(tile_total, words);
      const Carry carry =
          look_back<Scan>(words_of_row<Scan>(operands, row), index - row * operands.tiles_per_row,
                          words, [&] { return tile.state_before_row(); });
      if (lane == 0) shared_carry = carry;
    }
    __syncthreads();
    into_tile = static_cast<typename Scan::Compute>(shared_carry);
  }
#pragma unroll
  for (int r = 0; r < Tile::kRounds; ++r) {
    Element into = into_lane[r];
    if (kLookBack || (is_open >> r & 1) != 0) into = Scan::combine(into_warp, into);
    Vec<T, Tile::kVec> result;
    tile.walk(r, tile.before_row(r), into, [&](int j, Element run) {
      if constexpr (kLookBack) {
        result[Tile::in_memory(j)] = convert<T>(Scan::result(into_tile, run));
      } else {
        result[Tile::in_memory(j)] = convert<T>(Scan::result(run));
      }
    });
    tile.store(r, result);
  }
}

}  // namespace warpwright
