// Makes the lists of ops/attention/cuda/sequence_tiles.h.
#include "ops/attention/cuda/sequence_tiles.h"

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "device/error_word.cuh"
#include "device/types.cuh"
#include "host/launch.h"

namespace warpwright {
namespace {

constexpr int kThreads = 1024;
constexpr int kGapBlocks = 64;

// Whether all ends are in order. Every thread of the block calls it; `report` reports a bad one.
__device__ bool ends_are_good(const SequenceTilesArgs& a, bool report) {
  const PackedSequences& s = a.sequences;
  bool bad = false;
  auto check = [&](const int32_t* ends, int64_t rows, int64_t longest, ErrorRecord* error) {
    // Without sequences the only end is where the rows of none begin.
    if (threadIdx.x == 0 && (ends[0] < 0 || ends[s.count] > rows)) {
      bad = true;
      if (report) report_error(error, 0, ends[0] < 0 ? ends[0] : ends[s.count]);
    }
    for (int64_t n = threadIdx.x; n < s.count; n += kThreads) {
      const int64_t begin = ends[n], end = ends[n + 1];
      if (begin >= 0 && begin <= end && end <= rows && end - begin <= longest) continue;
      bad = true;
      if (report) report_error(error, n, begin < 0 ? begin : end);
    }
  };
  check(s.cu_q, a.total_q, s.max_q, a.errors.queries);
  check(s.cu_k, a.total_k, s.max_k, a.errors.keys);
  return __syncthreads_or(bad) == 0;
}

// The exclusive sum of `value` over the block's threads; `total` gets the sum of all.
__device__ int sum_before(int value, int& total) {
  __shared__ int of_warps[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  auto scan = [lane](int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, x, step);
      if (lane >= step) x += other;
    }
    return x;
  };
  const int inclusive = scan(value);
  if (lane == 31) of_warps[warp] = inclusive;
  __syncthreads();
  if (warp == 0) of_warps[lane] = scan(of_warps[lane]);
  __syncthreads();
  const int before = warp == 0 ? 0 : of_warps[warp - 1];
  total = of_warps[kThreads / 32 - 1];
  __syncthreads();
  return before + inclusive - value;
}

// Which of the `count` sequences from `begin` on is the caller's: those with the most rows of the
// other operand come first. Of equals the earlier one does.
__device__ int sequence_by_work(const PackedSequences& s, const SequenceTileList& list,
                                int64_t begin, int count) {
  __shared__ int work[kThreads], order[kThreads];
  const int32_t* ends = list.of_queries ? s.cu_k : s.cu_q;
  const int mine = static_cast<int>(threadIdx.x);
  const bool exists = mine < count;
  work[mine] = exists ? ends[begin + mine + 1] - ends[begin + mine] : -1;
  __syncthreads();
  int rank = 0;
  for (int i = 0; i < count; ++i)
    rank += work[i] > work[mine] || (work[i] == work[mine] && i < mine) ? 1 : 0;
  if (exists) order[rank] = mine;
  __syncthreads();
  return exists ? order[mine] : 0;
}

struct PlacedSequence {
  SequenceTile tile;  // without rows and heads
  int rows_tiles, first;
};

__device__ PlacedSequence placed(const PackedSequences& s, const SequenceTileList& list,
                                 int64_t n) {
  PlacedSequence p{};
  const int q_begin = s.cu_q[n], k_begin = s.cu_k[n];
  p.tile.q_end = s.cu_q[n + 1], p.tile.k_end = s.cu_k[n + 1];
  p.tile.S_q = p.tile.q_end - q_begin, p.tile.S_k = p.tile.k_end - k_begin;
  p.tile.stats = static_cast<int>(packed_stats_begin(q_begin, n));
  const int rows = list.of_queries ? p.tile.S_q : p.tile.S_k;
  p.rows_tiles = (rows + list.plan.tile_rows - 1) / list.plan.tile_rows;
  return p;
}

// Sequences are ordered within runs of kThreads.
__device__ void make_list(const SequenceTilesArgs& a, const SequenceTileList& list, bool good) {
  __shared__ PlacedSequence chunk[kThreads];
  const SequenceListPlan& plan = list.plan;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int base = 0;
  for (int64_t begin = 0; good && begin < a.sequences.count; begin += kThreads) {
    const int used = static_cast<int>(min(int64_t(kThreads), a.sequences.count - begin));
    const int sequence = sequence_by_work(a.sequences, list, begin, used);
    PlacedSequence mine{};
    if (threadIdx.x < used) mine = placed(a.sequences, list, begin + sequence);
    int tiles;
    mine.first = base + sum_before(mine.rows_tiles * plan.sections, tiles);
    chunk[threadIdx.x] = mine;
    __syncthreads();
    for (int i = warp; i < used; i += kThreads / 32) {
      const PlacedSequence p = chunk[i];
      for (int t = lane; t < p.rows_tiles * plan.sections; t += 32) {
        const int section = t / p.rows_tiles, rank = t - section * p.rows_tiles;
        SequenceTile tile = p.tile;
        tile.row0 = (list.longest_is_last ? p.rows_tiles - 1 - rank : rank) * plan.tile_rows;
        tile.head = section * plan.section;
        list.tiles[p.first + t] = tile;
      }
    }
    base += tiles;
    __syncthreads();
  }
  if (threadIdx.x == 0) *list.num_tiles = base * plan.section;
}

// Fills [begin, end) of memory aligned to 16 bytes with a 16-bit pattern. Both are even.
__device__ void fill(void* data, int64_t begin, int64_t end, uint32_t pattern) {
  const int64_t thread = (blockIdx.x % kGapBlocks) * int64_t(kThreads) + threadIdx.x;
  constexpr int64_t kAll = int64_t(kGapBlocks) * kThreads;
  char* bytes = static_cast<char*>(data);
  const int64_t first = min(end, (begin + 15) / 16 * 16), last = max(first, end / 16 * 16);
  const uint32_t two = pattern | pattern << 16;
  for (int64_t i = first / 16 + thread; i < last / 16; i += kAll)
    reinterpret_cast<uint4*>(bytes)[i] = make_uint4(two, two, two, two);
  for (int64_t i = begin / 2 + thread; i < first / 2; i += kAll)
    reinterpret_cast<uint16_t*>(bytes)[i] = static_cast<uint16_t>(pattern);
  for (int64_t i = last / 2 + thread; i < end / 2; i += kAll)
    reinterpret_cast<uint16_t*>(bytes)[i] = static_cast<uint16_t>(pattern);
}

template <class Lse>
__device__ void fill_lse(const SequenceTilesArgs& a, int64_t begin, int64_t end, Lse value) {
  const int64_t thread = (blockIdx.x % kGapBlocks) * int64_t(kThreads) + threadIdx.x;
  const int64_t before = begin, rows = begin + a.total_q - end;
  Lse* lse = static_cast<Lse*>(a.gaps.lse);
  for (int64_t i = thread; i < rows * a.gaps.lse_heads; i += int64_t(kGapBlocks) * kThreads) {
    const int64_t h = i / rows, row = i - h * rows;
    lse[h * a.total_q + (row < before ? row : row - before + end)] = value;
  }
}

// Rows before the first sequence and after the last one. Without good ends all rows are NaN, which
// the 16-bit pattern is in every type.
__device__ void fill_gaps(const SequenceTilesArgs& a, bool good) {
  const PackedSequences& s = a.sequences;
  constexpr uint32_t kNaN = 0x7fff;
  for (const SequenceGaps::Rows& r : a.gaps.results) {
    if (r.data == nullptr) continue;
    const int32_t* ends = r.of_queries ? s.cu_q : s.cu_k;
    const int64_t rows = r.of_queries ? a.total_q : a.total_k;
    const int64_t begin = good ? ends[0] : rows, end = good ? ends[s.count] : rows;
    fill(r.data, 0, begin * r.row_bytes, good ? 0u : kNaN);
    fill(r.data, end * r.row_bytes, rows * r.row_bytes, 0u);
  }
  if (a.gaps.lse == nullptr) return;
  const int64_t begin = good ? s.cu_q[0] : a.total_q, end = good ? s.cu_q[s.count] : a.total_q;
  if (a.gaps.lse_is_double)
    fill_lse<double>(a, begin, end, good ? -double(INFINITY) : double(NAN));
  else
    fill_lse<float>(a, begin, end, good ? -INFINITY : NAN);
}

// grid.x: a block per list, then kGapBlocks that fill the gaps.
__global__ void __launch_bounds__(kThreads)
    sequence_tiles_kernel(const __grid_constant__ SequenceTilesArgs a) {
  let_next_kernel_start();
  const bool good = ends_are_good(a, blockIdx.x == 0);
  const int list = static_cast<int>(blockIdx.x);
  if (list == 0 && threadIdx.x < kAttentionTileCounters) a.counters[threadIdx.x] = 0;
  if (list < a.num_lists)
    make_list(a, a.lists[list], good);
  else
    fill_gaps(a, good);
}

}  // namespace

void launch_sequence_tiles(const SequenceTilesArgs& args, cudaStream_t stream) {
  launch(sequence_tiles_kernel, dim3(static_cast<unsigned>(args.num_lists + kGapBlocks)),
         dim3(kThreads), 0, stream, args);
}

}  // namespace warpwright
