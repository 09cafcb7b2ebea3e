// embedding: output[i] = weight[indices[i]]. Memory-bound: the forward reads and writes each row
// once. The gradient of the weight is the sum of the output's gradient over the positions of each
// row, and zero for a row without a position: it reads the output's gradient once and writes the
// weight's gradient once.
//
// The backward groups positions by row, without a sort if it can. Each row is in one bucket, and
// each bucket has a block. A block reads all indices twice. First it counts those of its bucket and
// of the buckets before it. Then it writes its positions to their places in the grouped list. If
// this would read the indices too often, they are sorted instead. Parts of the list are summed in
// the list's order, which within a row is that of the positions.
//
// Layout: weight (rows, columns) with a pitch, indices (count), output (count, columns), dense.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"
#include "common/error_record.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// Moves bytes, whatever their type is.
struct EmbeddingParams {
  DType index_dtype;  // int32 or int64
  int64_t count, rows;
  int64_t row_bytes;     // of the output
  int64_t element_size;  // bytes
  int64_t pitch;         // bytes between rows of the weight
  int64_t column_pitch;  // bytes between its columns
  const void* weight;
  const void* indices;
  void* output;
  ErrorRecord* error;  // receives the report of an index out of range; not used on the CPU
};

// Scales rows of the weight, in place, so that no norm exceeds max_norm.
struct EmbeddingRenormParams {
  DType dtype;
  DType index_dtype;
  int64_t count, rows, columns;
  int64_t pitch, column_pitch;  // in elements
  double max_norm, norm_type;
  void* weight;
  const void* indices;
  void* owners;  // (rows) int64, uninitialised
  ErrorRecord* error;
};

struct EmbeddingBackwardParams {
  DType dtype;
  DType index_dtype;
  int64_t count, rows, columns;
  int64_t pitch;            // elements between rows of grad_output
  int64_t padding_idx;      // a row that gets no gradient, or no row
  bool scale_grad_by_freq;  // divides each row by its number of positions
  const void* grad_output;
  const void* indices;
  void* grad_weight;
  ErrorRecord* error;
  // Of a plan with a sort: the rows that launch_embedding_rows wrote, ascending, and the position
  // of each. Equal rows are in the order of their positions.
  const int32_t* sorted_rows;
  const int64_t* sorted_positions;
};

struct EmbeddingPlan {
  int width;       // bytes per access
  int lanes;       // threads per row, or per strip of a row
  bool is_narrow;  // a row is one access per thread: a group of threads has several rows in flight
  int64_t accesses, strips;  // per row
  int64_t blocks;
  const char* reason;
};

struct EmbeddingBackwardPlan {
  bool is_sorted;                // the caller sorts; else blocks find the positions of their rows
  int64_t buckets, bucket_rows;  // of the grouping: row r is in bucket r % buckets
  uint32_t magic;                // r / buckets = (r * magic >> 32) >> shift
  int shift;
  int vec;                   // elements per access
  int lanes;                 // threads per strip of a row
  int width;                 // accesses per thread
  int64_t accesses, strips;  // per row
  int64_t sum_blocks;
  int64_t fill_rows, fill_blocks;  // zeros: rows per block, blocks
  int64_t early_row;               // from this row on, zeros are written while others group
  int64_t early_blocks;            // that do
  int64_t slots;                   // partial sums
  int levels;                      // of the tree that adds them up
  // Offsets in the workspace, in bytes.
  int64_t bitmap, counters, partials, workspace_bytes;
  const char* reason;
};

constexpr int kEmbeddingThreads = 128;
constexpr int kEmbeddingAhead = 4;           // accesses in flight per thread
constexpr int kEmbeddingRows = 2;            // that a warp copies at once, if they are wide
constexpr int kEmbeddingGroupThreads = 512;  // of a block that groups; also its rows, at most
constexpr int64_t kEmbeddingRowBytes = 4 * (kEmbeddingGroupThreads / 32 + 2);  // shared memory
constexpr int kEmbeddingGroupAhead = 8;                           // indices in flight per thread
constexpr int kEmbeddingQueue = 32 * (kEmbeddingGroupAhead + 1);  // positions per warp
constexpr int64_t kEmbeddingQueueBytes = kEmbeddingGroupThreads / 32 * kEmbeddingQueue * 8;
constexpr int kEmbeddingWidth = 3;  // accesses per thread and row, of sums of wide rows
// Indices that all buckets together read. Beyond it a sort is faster.
constexpr int64_t kEmbeddingMostReads = 48 << 20;
constexpr int64_t kEmbeddingPart = 8;               // positions per partial sum, at least
constexpr int kEmbeddingFan = 16;                   // partial sums that a node of the tree adds
constexpr int64_t kEmbeddingFillBytes = 65536;      // zeros per block, about
constexpr int64_t kEmbeddingEarlyBytes = 32 << 20;  // what memory takes while blocks group
// The grouped list holds rows and positions as int32.
constexpr int64_t kEmbeddingMost = (int64_t{1} << 31) - 1;

constexpr int embedding_lanes(int64_t accesses) {
  return accesses >= 32 ? 32 : static_cast<int>(std::bit_ceil(static_cast<uint64_t>(accesses)));
}

inline EmbeddingPlan choose_embedding(const EmbeddingParams& p) {
  EmbeddingPlan plan{};
  const bool is_dense = p.column_pitch == p.element_size;
  const auto bits = addresses_of(p.weight, p.output) | static_cast<uintptr_t>(p.row_bytes) |
                    static_cast<uintptr_t>(p.pitch) | 16;
  plan.width = static_cast<int>(is_dense ? int64_t{1} << std::countr_zero(bits) : p.element_size);
  plan.reason = !is_dense          ? "the weight's columns are apart: element accesses"
                : plan.width == 16 ? "16-byte accesses"
                                   : "a row or address is no multiple of 16 bytes";
  plan.accesses = p.row_bytes / plan.width;
  plan.lanes = embedding_lanes(plan.accesses);
  plan.is_narrow = plan.accesses <= 32;
  plan.strips = plan.is_narrow ? 1 : ceil_div(plan.accesses, int64_t{32} * kEmbeddingAhead);
  const int64_t rows = plan.is_narrow ? kEmbeddingAhead : kEmbeddingRows;  // per group
  const int64_t groups = ceil_div(p.count, rows) * plan.strips;
  plan.blocks = ceil_div(groups, int64_t{kEmbeddingThreads / plan.lanes});
  return plan;
}

constexpr int64_t embedding_aligned(int64_t bytes) { return ceil_div(bytes, int64_t{256}) * 256; }

inline EmbeddingBackwardPlan choose_embedding_backward(const EmbeddingBackwardParams& p,
                                                       const DeviceInfo& device) {
  EmbeddingBackwardPlan plan{};
  const int64_t size = dtype_size(p.dtype);
  const auto bits = addresses_of(p.grad_output, p.grad_weight) |
                    static_cast<uintptr_t>(p.columns * size) |
                    static_cast<uintptr_t>(p.pitch * size);
  plan.vec = bits % 16 == 0 ? static_cast<int>(16 / size) : 1;
  plan.reason = plan.vec > 1 ? "16-byte accesses"
                             : "a row or address is no multiple of 16 bytes: element accesses";
  plan.accesses = p.columns / plan.vec;
  plan.lanes = embedding_lanes(plan.accesses);
  plan.width = plan.accesses > 32 ? kEmbeddingWidth : 1;
  plan.strips = ceil_div(plan.accesses, int64_t{plan.lanes} * plan.width);

  // A bucket per SM, as far as its counters fit. Neighbouring rows are in different buckets,
  // because tokens are often numbered by their frequency.
  const int64_t fits =
      (device.smem_per_block - 1024 - kEmbeddingQueueBytes) / kEmbeddingRowBytes / 32 * 32;
  const int64_t most = std::min<int64_t>(kEmbeddingGroupThreads, fits);
  const int64_t wanted = ceil_div(ceil_div(p.rows, int64_t{device.num_sms}), int64_t{32}) * 32;
  plan.bucket_rows = std::min(most, wanted);
  plan.buckets = std::max<int64_t>(2, ceil_div(p.rows, plan.bucket_rows));
  plan.is_sorted = 2 * plan.buckets * p.count > kEmbeddingMostReads;
  if (plan.is_sorted) {  // buckets are then the layout of the bit map alone
    plan.buckets = 2;
    plan.bucket_rows = ceil_div(p.rows, int64_t{64}) * 32;
  }
  plan.shift = static_cast<int>(std::bit_width(static_cast<uint64_t>(plan.buckets - 1))) - 1;
  plan.magic = static_cast<uint32_t>(
      (uint64_t{1} << (32 + plan.shift)) / static_cast<uint64_t>(plan.buckets) + 1);

  const int64_t groups_per_block = kEmbeddingThreads / plan.lanes;
  plan.sum_blocks = ceil_div(p.count * plan.strips, groups_per_block);
  const int64_t row_bytes = p.columns * size;
  const int64_t early = plan.is_sorted ? 0 : std::min(p.rows / 2, kEmbeddingEarlyBytes / row_bytes);
  plan.early_row = p.rows - early;
  plan.early_blocks =
      std::min<int64_t>(device.num_sms, ceil_div(early * row_bytes, kEmbeddingFillBytes));
  plan.fill_rows = std::max<int64_t>(groups_per_block, kEmbeddingFillBytes / row_bytes);
  plan.fill_blocks = ceil_div(plan.early_row, plan.fill_rows);

  plan.slots = p.count / kEmbeddingPart + 1;
  for (int64_t nodes = plan.slots; nodes > 1; nodes = ceil_div(nodes, int64_t{kEmbeddingFan})) {
    ++plan.levels;
  }
  plan.bitmap = embedding_aligned(16 + p.count * 16);
  plan.counters = plan.bitmap + embedding_aligned(plan.buckets * plan.bucket_rows / 8);
  plan.partials = plan.counters + embedding_aligned(plan.levels * plan.slots * plan.strips * 4);
  const int64_t accumulator = p.dtype == DType::kFloat64 ? 8 : 4;
  plan.workspace_bytes = plan.partials + embedding_aligned(plan.slots * p.columns * accumulator);
  return plan;
}

inline std::string describe(const EmbeddingPlan& plan) {
  return std::to_string(plan.blocks) + " block(s) of " + std::to_string(kEmbeddingThreads) +
         " threads, " + std::to_string(plan.lanes) + " per " +
         (plan.is_narrow ? "row" : "strip of a row") + ", " + std::to_string(plan.width) +
         " bytes per access: " + plan.reason;
}

// One line per kernel.
inline std::string describe_grouping(const EmbeddingBackwardPlan& plan) {
  if (plan.is_sorted) {
    return "a stable radix sort of the indices: a pass over them per bucket of rows would take "
           "more";
  }
  return std::to_string(plan.buckets) + " bucket(s) of " + std::to_string(plan.bucket_rows) +
         " rows, a block each: two passes over the indices, no sort; " +
         std::to_string(plan.early_blocks) + " block(s) write zeros at once";
}
inline std::string describe(const EmbeddingBackwardPlan& plan) {
  return std::to_string(plan.sum_blocks) + " block(s) that sum, " +
         std::to_string(plan.fill_blocks) + " that write zeros, " + std::to_string(plan.lanes) +
         " threads per strip, " + std::to_string(plan.strips) + " strip(s) per row, " +
         std::to_string(plan.vec) + " element(s) per access: " + plan.reason;
}

// Calls f<Index>() for the type of the indices.
template <class F>
void for_index(DType dtype, F&& f) {
  dtype == DType::kInt32 ? f.template operator()<int32_t>() : f.template operator()<int64_t>();
}

// Both return the first position whose index is no row, or -1.
int64_t embedding_cpu(const EmbeddingParams& params);
int64_t find_bad_index(const EmbeddingBackwardParams& params);
void embedding_backward_cpu(const EmbeddingBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_embedding(const EmbeddingParams& params, const EmbeddingPlan& plan,
                      cudaStream_t stream);
void launch_embedding_renorm(const EmbeddingRenormParams& params, cudaStream_t stream);
// `workspace`: plan.workspace_bytes, of both launches.
// For a plan with a sort: writes the row of each position, (count). Row p.rows has no gradient.
void launch_embedding_rows(const EmbeddingBackwardParams& params, const EmbeddingBackwardPlan& plan,
                           void* workspace, int32_t* rows, cudaStream_t stream);
void launch_embedding_backward(const EmbeddingBackwardParams& params,
                               const EmbeddingBackwardPlan& plan, void* workspace,
                               cudaStream_t stream);
#endif

}  // namespace warpwright
