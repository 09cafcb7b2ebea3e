// The grouping of embedding's backward by a sort, for tables with so many buckets that each of
// them can't read all indices. Indices become rows of 32 bits; ATen's stable sort of them is a
// radix sort of CUB; then each entry finds the bounds of its row.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/error_word.cuh"
#include "ops/embedding/grouping.cuh"

namespace warpwright {
namespace {

// indices (count) -> rows (count); what has no gradient becomes p.rows, which sorts to the end.
// Zeros bitmap and counters.
template <class Index>
__global__ void __launch_bounds__(kGroupThreads)
    rows_of_indices(EmbeddingBackwardParams p, Workspace w, EmbeddingBackwardPlan plan,
                    int32_t* rows) {
  const int64_t thread = int64_t{blockIdx.x} * kGroupThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kGroupThreads;
  for (int64_t i = thread; i < plan.buckets * plan.bucket_rows / 32; i += threads) w.bitmap[i] = 0;
  const int64_t counters = plan.levels * plan.slots * plan.strips;
  for (int64_t i = thread; i < counters; i += threads) w.counters[i] = 0;
  for (int64_t i = thread; i < p.count; i += threads) {
    const Index index = static_cast<const Index*>(p.indices)[i];
    const bool is_padding = index == p.padding_idx;
    const bool is_row = index >= 0 && index < p.rows;
    if (!is_row && !is_padding) report_error(p.error, i, index);
    rows[i] = static_cast<int32_t>(is_row && !is_padding ? index : p.rows);
  }
}

// The first of the ascending rows[first, last) that is at least `row`.
__device__ __forceinline__ int64_t lower_bound(const int32_t* rows, int64_t first, int64_t last,
                                               int64_t row) {
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    rows[middle] < row ? first = middle + 1 : last = middle;
  }
  return first;
}

// rows, positions (count), sorted -> entries, total, bitmap. A thread per entry.
__global__ void __launch_bounds__(kGroupThreads)
    list_sorted(EmbeddingBackwardParams p, Workspace w, EmbeddingBackwardPlan plan) {
  let_next_kernel_start();
  const int64_t i = int64_t{blockIdx.x} * kGroupThreads + threadIdx.x;
  if (i >= p.count) return;
  const int32_t row = p.sorted_rows[i];
  if (i == p.count - 1) *w.total = lower_bound(p.sorted_rows, 0, p.count, p.rows);
  if (row == p.rows) return;
  const int64_t first = lower_bound(p.sorted_rows, 0, i, row);
  const int64_t end = lower_bound(p.sorted_rows, i + 1, p.count, int64_t{row} + 1);
  const auto rank = static_cast<int>(i - first);
  w.entries[i] = {static_cast<int>(p.sorted_positions[i]), row, rank,
                  static_cast<int>(end - first)};
  if (rank == 0) {
    const uint32_t bit = bit_of_row(plan, static_cast<uint32_t>(row));
    atomicOr(w.bitmap + bit / 32, 1u << (bit % 32));
  }
}

}  // namespace
}  // namespace warpwright
