// What every kernel of this op does alike: lengths, pages, and the splits of a sequence.
#pragma once

#include "device/error_word.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/attention_with_kv_cache/attention_with_kv_cache.h"

namespace warpwright {

constexpr int kKvWarps = 4;  // of a CTA: each walks keys of its own
constexpr int kKvThreads = kKvWarps * kWarpSize;

// Facts of a launch that the host computes once.
struct KvLaunch {
  FastDivmod page_size;
  int64_t splits;
  KvCacheErrors errors;
  // Of each row (B, H_kv, rows) and split: the output before division, and base and sum of the
  // softmax. Null with one split.
  void *partial_out, *partial_stats;
};

// The tokens of sequence b that queries may see, or -1 for a length that the cache cannot hold.
__device__ __forceinline__ int64_t sequence_length(const KvCacheLayout& layout, int64_t b) {
  const int64_t before = layout.cache_seqlens[b];
  const bool fits = before >= 0 && before + layout.appended <= layout.capacity();
  return fits ? before + layout.appended : -1;
}

// A token's place in the cache; page -1 for a bad entry of the block table.
struct KvPlace {
  int page, token;
};

__device__ __forceinline__ KvPlace place_of(const KvCacheLayout& layout, const KvLaunch& args,
                                            int64_t b, int key) {
  if (layout.block_table == nullptr) return {static_cast<int>(b), key};
  const int index = args.page_size.quotient(key);
  const int entry = layout.block_table[b * layout.table_stride + index];
  const bool valid = entry >= 0 && entry < layout.num_pages;
  if (!valid) report_error(args.errors.table, b * layout.max_pages + index, entry);
  return {valid ? entry : -1, key - index * static_cast<int>(args.page_size.divisor)};
}

// What a CTA works on.
struct KvWork {
  int64_t b, h_kv, row0;      // row0: the first of its rows, of those that share h_kv
  int64_t split, begin, end;  // of the keys; equal for an empty split
  int64_t length;
};

// The work of this CTA in a grid of (B, splits, H_kv, row blocks). Sets `bad` and reports if the
// length is bad, and then leaves no keys.
__device__ __forceinline__ KvWork find_work(const KvAttentionParams& p, const KvLaunch& args,
                                            int rows_per_cta, bool& bad) {
  const int64_t blocks = ceil_div(p.rows(), int64_t{rows_per_cta});
  int64_t index = blockIdx.x;
  KvWork work;
  work.row0 = index % blocks * rows_per_cta, index /= blocks;
  work.h_kv = index % p.H_kv, index /= p.H_kv;
  work.split = index % args.splits;
  work.b = index / args.splits;
  const int64_t length = sequence_length(p.layout, work.b);
  bad = length < 0;
  if (bad) report_error(args.errors.lengths, work.b, p.layout.cache_seqlens[work.b]);
  work.length = max(length, int64_t{0});
  const int64_t keys = kv_split_keys(work.length, args.splits);
  work.begin = min(work.split * keys, work.length);
  work.end = min(work.begin + keys, work.length);
  return work;
}

// Where row `row` of those that share h_kv goes.
template <class T>
__device__ __forceinline__ T* output_row(const KvAttentionParams& p, int64_t b, int64_t h_kv,
                                         int64_t row) {
  const int64_t group = p.group();
  return static_cast<T*>(p.out) +
         ((b * p.L_q + row / group) * p.H + h_kv * group + row % group) * p.D;
}

}  // namespace warpwright
