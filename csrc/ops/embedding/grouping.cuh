// How the backward of embedding groups the positions of indices by row: the first of its two
// kernels.
#pragma once

#include <type_traits>

#include "device/access.cuh"
#include "device/dependent_launch.cuh"
#include "device/error_word.cuh"
#include "device/vec.cuh"
#include "ops/embedding/embedding.h"

namespace warpwright {
namespace {

constexpr int kGroupThreads = kEmbeddingGroupThreads;
constexpr int kGroupWarps = kGroupThreads / 32;
constexpr int kGroupAhead = kEmbeddingGroupAhead;
constexpr int kPart = static_cast<int>(kEmbeddingPart);

// A position in the grouped list: entry `rank` of the `size` positions of `row`.
struct alignas(16) Entry {
  int position, row, rank, size;

  // A row's positions are summed in parts of kPart; the last part has up to 2 kPart - 1.
  __device__ int parts() const { return max(1, size / kPart); }
  __device__ int part() const { return min(rank / kPart, parts() - 1); }
};

struct Workspace {
  int64_t* total;    // entries of the list
  Entry* entries;    // (count)
  uint32_t* bitmap;  // (buckets, bucket_rows) bits: rows that have positions
  int* counters;     // (levels, slots, strips)
  void* partials;    // (slots, columns), in the accumulator's type
};

Workspace workspace_of(void* bytes, const EmbeddingBackwardPlan& plan) {
  auto* start = static_cast<char*>(bytes);
  return {reinterpret_cast<int64_t*>(start), reinterpret_cast<Entry*>(start + 16),
          reinterpret_cast<uint32_t*>(start + plan.bitmap),
          reinterpret_cast<int*>(start + plan.counters), start + plan.partials};
}

// ---- zeros ----

template <class T, int kVec>
__device__ __forceinline__ void clear_access(T* target) {
  if constexpr (sizeof(T) * kVec == kVecBytes) {
    store_vec_streaming<kVec>(target, Vec<T, kVec>{});
  } else {
    store_vec<kVec>(target, Vec<T, kVec>{});
  }
}

// A group of `lanes` threads writes zeros to a row.
template <class T, int kVec>
__device__ __forceinline__ void clear_row(const EmbeddingBackwardParams& p, int64_t row, int lanes,
                                          int64_t accesses) {
  T* target = static_cast<T*>(p.grad_weight) + row * p.columns;
  for (int64_t access = threadIdx.x % lanes; access < accesses; access += lanes) {
    clear_access<T, kVec>(target + access * kVec);
  }
}

// ---- grouping ----

// The rows of one bucket: bucket, bucket + buckets, bucket + 2 buckets, ...
struct Bucket {
  uint32_t buckets, bucket;
  uint32_t magic;  // of the division by `buckets`
  int shift;
  uint32_t all_rows;
  uint32_t padding;  // a row, or ~0

  __device__ int64_t row(int local) const { return int64_t{local} * buckets + bucket; }
};

__device__ __forceinline__ uint32_t row_in_bucket(uint32_t row, uint32_t magic, int shift) {
  return __umulhi(row, magic) >> shift;
}

// Of the bit map, (buckets, bucket_rows) bits.
__device__ __forceinline__ uint32_t bit_of_row(const EmbeddingBackwardPlan& plan, uint32_t row) {
  const uint32_t local = row_in_bucket(row, plan.magic, plan.shift);
  const uint32_t bucket = row - local * static_cast<uint32_t>(plan.buckets);
  return bucket * static_cast<uint32_t>(plan.bucket_rows) + local;
}

// A position whose row, `local` within the bucket, is the block's.
struct Found {
  int position, local;
};

// Walks over the warp's share of the positions. Collects those of the bucket in `queue`, in their
// order, and calls f(found, lanes that have one) for 32 at a time. Counts the indices of the
// buckets before. The loop over collected positions is not unrolled: its code would not fit into
// the instruction cache.
template <class Index, class F>
__device__ __forceinline__ void for_tokens(const EmbeddingBackwardParams& p, const Bucket& b,
                                           bool reports, Found* queue, int& before, F&& f) {
  const auto* indices = static_cast<const Index*>(p.indices);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int64_t share = ceil_div(p.count, int64_t{kGroupThreads}) * 32;
  const int64_t end = min(p.count, (warp + 1) * share);
  int queued = 0;
#pragma unroll 1
  for (int64_t base = warp * share; base < end; base += 32 * kGroupAhead) {
    Index index[kGroupAhead];
#pragma unroll
    for (int j = 0; j < kGroupAhead; ++j) {
      const int64_t position = base + j * 32 + lane;
      index[j] = position < end ? indices[position] : Index(-1);
    }
#pragma unroll
    for (int j = 0; j < kGroupAhead; ++j) {
      const int64_t position = base + j * 32 + lane;
      const auto row = static_cast<uint32_t>(index[j]);
      const bool is_row = static_cast<std::make_unsigned_t<Index>>(index[j]) < b.all_rows;
      if (reports && !is_row && position < end && index[j] != p.padding_idx) {
        report_error(p.error, position, index[j]);
      }
      const uint32_t local = row_in_bucket(row, b.magic, b.shift);
      const uint32_t bucket = row - local * b.buckets;
      const bool counts = is_row && row != b.padding;
      const bool is_mine = counts && bucket == b.bucket;
      before += counts && bucket < b.bucket;
      const unsigned mine = __ballot_sync(~0u, is_mine);
      if (is_mine) {
        queue[queued + __popc(mine & ((1u << lane) - 1))] = {static_cast<int>(position),
                                                             static_cast<int>(local)};
      }
      queued += __popc(mine);
    }
    __syncwarp();
    const bool is_last = base + 32 * kGroupAhead >= end;
    int first = 0;
#pragma unroll 1
    for (; queued - first >= 32 || (is_last && first < queued); first += 32) {
      const int count = min(32, queued - first);
      Found found{0, -1};
      if (lane < count) found = queue[first + lane];
      f(found, count == 32 ? ~0u : (1u << count) - 1);
    }
    queued = max(0, queued - first);
    Found rest{};
    if (lane < queued) rest = queue[first + lane];
    __syncwarp();
    if (lane < queued) queue[lane] = rest;
    __syncwarp();
  }
}

// The exclusive sum of `value` over the block's threads, and the sum. `scratch` has kGroupWarps + 1
// elements.
__device__ __forceinline__ int exclusive_sum(int value, int* scratch, int& total) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const int mine = lane < kGroupWarps ? scratch[lane] : 0;
    int sums = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sums, distance);
      if (lane >= distance) sums += other;
    }
    if (lane < kGroupWarps) scratch[lane] = sums - mine;
    if (lane == 31) scratch[kGroupWarps] = sums;
  }
  __syncthreads();
  total = scratch[kGroupWarps];
  const int result = scratch[warp] + sum - value;
  __syncthreads();
  return result;
}

// Shared memory of a block that groups.
struct Counts {
  int* of_warp;  // (warp, row of the bucket)
  int* first;    // of each row: its first entry within the bucket
  int* sizes;    // of each row: its positions
  Found* queue;  // (warp, kEmbeddingQueue)

  __device__ Counts(int* shared, int rows)
      : of_warp(shared + threadIdx.x / 32 * rows),
        first(shared + kGroupWarps * rows),
        sizes(first + rows),
        queue(reinterpret_cast<Found*>(sizes + rows) + threadIdx.x / 32 * kEmbeddingQueue) {}
};

// The first pass over the indices. Then a thread per row finds where each warp's positions start.
// Returns the bucket's first entry.
template <class Index>
__device__ __forceinline__ int64_t count_tokens(const EmbeddingBackwardParams& p,
                                                const Workspace& w, const Bucket& b, int* shared,
                                                int* scratch, int rows) {
  const auto thread = static_cast<int>(threadIdx.x);
  const Counts counts(shared, rows);
  for (int i = thread; i < kGroupWarps * rows; i += kGroupThreads) shared[i] = 0;
  __syncthreads();
  int before = 0;
  for_tokens<Index>(p, b, b.bucket == 0, counts.queue, before, [&](Found found, unsigned lanes) {
    if (found.local >= 0) {
      const unsigned peers = __match_any_sync(lanes, found.local);
      if (thread % 32 == __ffs(peers) - 1) counts.of_warp[found.local] += __popc(peers);
    }
    __syncwarp();
  });
  __syncthreads();
  int size = 0;
  if (thread < rows) {
#pragma unroll 8
    for (int warp = 0; warp < kGroupWarps; ++warp) {
      const int count = shared[warp * rows + thread];
      shared[warp * rows + thread] = size;
      size += count;
    }
  }
  int listed = 0, all_before = 0;
  const int start = exclusive_sum(size, scratch, listed);
  exclusive_sum(before, scratch, all_before);
  if (thread < rows) {
    counts.first[thread] = start;
    counts.sizes[thread] = size;
    const unsigned word = __ballot_sync(~0u, size > 0);
    if (thread % 32 == 0) w.bitmap[(b.bucket * rows + thread) / 32] = word;
  }
  if (b.bucket == b.buckets - 1 && thread == 0) *w.total = int64_t{all_before} + listed;
  __syncthreads();
  return all_before;
}

// The second pass: writes the positions of the bucket to the list.
template <class Index>
__device__ __forceinline__ void list_tokens(const EmbeddingBackwardParams& p, const Workspace& w,
                                            const Bucket& b, int* shared, int rows,
                                            int64_t first_entry) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const Counts counts(shared, rows);
  int before = 0;
  for_tokens<Index>(p, b, false, counts.queue, before, [&](Found found, unsigned lanes) {
    const int row = found.local;
    unsigned peers = 0;
    int rank = 0;
    if (row >= 0) {
      peers = __match_any_sync(lanes, row);
      rank = counts.of_warp[row] + __popc(peers & ((1u << lane) - 1));
    }
    __syncwarp();
    if (row >= 0) {
      if (lane == __ffs(peers) - 1) counts.of_warp[row] += __popc(peers);
      w.entries[first_entry + counts.first[row] + rank] = {
          found.position, static_cast<int>(b.row(row)), rank, counts.sizes[row]};
    }
    __syncwarp();
  });
}

// indices (count) -> entries, grouped by row and in the order of the positions; bitmap; zeroed
// counters. A block per bucket of rows. Further blocks write zeros to the last rows of grad_weight,
// because grouping leaves memory idle. The next kernel overwrites the rows that have positions.
template <class T, int kVec, class Index>
__global__ void __launch_bounds__(kGroupThreads, 2)
    group_positions(EmbeddingBackwardParams p, Workspace w, EmbeddingBackwardPlan plan) {
  let_next_kernel_start();
  extern __shared__ int shared[];
  __shared__ int scratch[kGroupWarps + 1];
  if (blockIdx.x >= plan.buckets) {
    const int64_t groups = kGroupThreads / plan.lanes;
    const int64_t step = (gridDim.x - plan.buckets) * groups;
    int64_t row = plan.early_row + (blockIdx.x - plan.buckets) * groups + threadIdx.x / plan.lanes;
    for (; row < p.rows; row += step) clear_row<T, kVec>(p, row, plan.lanes, plan.accesses);
    return;
  }
  const int64_t counters = plan.levels * plan.slots * plan.strips;
  for (int64_t i = int64_t{blockIdx.x} * kGroupThreads + threadIdx.x; i < counters;
       i += plan.buckets * kGroupThreads) {
    w.counters[i] = 0;
  }
  const bool pads = static_cast<uint64_t>(p.padding_idx) < static_cast<uint64_t>(p.rows);
  const Bucket b{static_cast<uint32_t>(plan.buckets),
                 blockIdx.x,
                 plan.magic,
                 plan.shift,
                 static_cast<uint32_t>(p.rows),
                 pads ? static_cast<uint32_t>(p.padding_idx) : ~0u};
  const int rows = static_cast<int>(plan.bucket_rows);
  const int64_t first_entry = count_tokens<Index>(p, w, b, shared, scratch, rows);
  list_tokens<Index>(p, w, b, shared, rows, first_entry);
}

}  // namespace
}  // namespace warpwright
