// Reductions along any axes: sum, mean, maximum, log-sum-exp, variance. Memory-bound: each element
// is read once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class ReductionKind : int8_t {
  kSum,
  kMean,
  kMax,
  kLogSumExp,
  kVar,  // sum of squared deviations from the mean, over (count - correction)
  kStd,  // its root
};

// ---- canonical form ----

struct ReductionAxis {
  int64_t size, stride;
  int64_t output_stride;  // of a kept axis
  bool is_reduced;
};

constexpr int kReductionAxes = 4;  // of one role, besides the innermost

// Axes of one role without the innermost axis. Of an index over them, the first axis is fastest.
struct ReductionTable {
  int count = 0;
  int64_t total = 1;  // the product of sizes
  ReductionAxis axes[kReductionAxes];
};

struct ReductionLayout {
  bool fits = true;     // otherwise the tables are incomplete, and the caller copies the tensor
  bool is_rows = true;  // the innermost axis is reduced
  ReductionAxis inner{1, 1, 0, true};
  ReductionTable kept, reduced;

  int64_t outputs() const { return kept.total * (is_rows ? 1 : inner.size); }
  int64_t per_output() const { return reduced.total * (is_rows ? inner.size : 1); }
};

// On a CPU: whether neighbouring outputs are reduced side by side, one per lane. Columns fewer than
// the lanes of a register are read as rows of elements that are not neighbours.
inline bool walks_columns(const ReductionLayout& a, int64_t lanes) {
  const bool may_be_rows = a.kept.count < kReductionAxes && a.reduced.count > 0;
  return !a.is_rows && (a.inner.size >= lanes || !may_be_rows);
}

// Drops axes of size 1, sorts the others by stride, and merges neighbours of one role that lie side
// by side. Strides of 0 come last, because they lead to no other memory. All sizes are at least 1.
// Returns how many remain at the front of `axes`.
inline int merge_axes(ReductionAxis* axes, int count) {
  count = static_cast<int>(
      std::remove_if(axes, axes + count, [](const ReductionAxis& a) { return a.size == 1; }) -
      axes);
  std::stable_sort(axes, axes + count, [](const ReductionAxis& a, const ReductionAxis& b) {
    if (a.stride == 0 || b.stride == 0) return b.stride == 0 && a.stride != 0;
    return a.stride < b.stride;
  });
  int merged = 0;
  for (int i = 0; i < count; ++i) {
    if (merged > 0) {
      ReductionAxis& last = axes[merged - 1];
      const bool joins =
          axes[i].is_reduced == last.is_reduced && axes[i].stride == last.stride * last.size &&
          (last.is_reduced || axes[i].output_stride == last.output_stride * last.size);
      if (joins) {
        last.size *= axes[i].size;
        continue;
      }
    }
    axes[merged++] = axes[i];
  }
  return merged;
}

// Reorders `axes`.
inline ReductionLayout canonical_layout(ReductionAxis* axes, int count) {
  const int merged = merge_axes(axes, count);
  ReductionLayout layout;
  if (merged == 0) return layout;
  layout.inner = axes[0];
  layout.is_rows = axes[0].is_reduced;
  for (int i = 1; i < merged; ++i) {
    ReductionTable& table = axes[i].is_reduced ? layout.reduced : layout.kept;
    table.total *= axes[i].size;
    layout.fits &= table.count < kReductionAxes;
    if (layout.fits) table.axes[table.count++] = axes[i];
  }
  // Kernels split an index over several reduced axes in 32 bits.
  constexpr int64_t kMaxIndex = int64_t{1} << 31;
  layout.fits &= layout.reduced.count < (layout.is_rows ? 1 : 2) || layout.per_output() < kMaxIndex;
  return layout;
}

struct ReductionParams {
  ReductionKind kind;
  DType dtype;         // floating
  DType output_dtype;  // that of the input, or float32 for 16-bit inputs
  double correction = 1;
  const void* input;
  void* output;  // as the layout's output_strides say
  ReductionLayout layout;
};

// What the sum, or the sum of squared deviations, is divided by.
inline double reduction_divisor(const ReductionParams& p) {
  const auto count = static_cast<double>(p.layout.per_output());
  if (p.kind == ReductionKind::kMean) return count;
  if (p.kind == ReductionKind::kVar || p.kind == ReductionKind::kStd) {
    return std::max(count - p.correction, 0.0);
  }
  return 1;
}

// ---- the GPU's plan ----

constexpr int kReductionThreads = 256;
constexpr int kReductionBlocksPerSm = 3;
constexpr int kReductionLoads = 8;  // vectors per thread in flight

enum class ReductionPath : int8_t {
  kGroups,   // some lanes of a warp per row of up to 32 vectors, 8 rows at once
  kWarps,    // a warp per row
  kBlocks,   // a block per row, or several
  kColumns,  // threads side by side over kept columns, and below each other over reduced rows
};

// Blocks of one output (or of one tile of columns) write partial results to the workspace. The one
// that draws the last ticket merges them in the order of their numbers. The workspace begins with
// the tickets.
struct ReductionPlan {
  ReductionPath path;
  bool vectorized = true;         // 16-byte loads
  bool is_whole_vectors = false;  // every run of elements begins and ends at 16-byte boundaries
  int log_lanes = 0;              // kGroups: of lanes per row. kColumns: of threads across
  int64_t vectors = 0;            // rows: of a run, at most. kColumns: across all kept axes
  int64_t column_blocks = 1;      // kColumns
  int64_t splits = 1;
  int64_t chunk = 0;  // vectors (rows) or rows (kColumns) per split
  int64_t blocks = 0;
  int64_t zeroed_bytes = 0;  // tickets
  int64_t workspace_bytes = 0;
  const char* reason = "";
};

// Whether runs of the innermost axis begin and end at 16-byte boundaries.
inline bool has_whole_vectors(const ReductionParams& p) {
  const int64_t vec = 16 / dtype_size(p.dtype);
  const ReductionLayout& a = p.layout;
  bool result = a.inner.stride == 1 && a.inner.size % vec == 0 &&
                reinterpret_cast<uintptr_t>(p.input) % 16 == 0;
  for (const ReductionTable* table : {&a.kept, &a.reduced}) {
    for (int i = 0; i < table->count; ++i) result &= table->axes[i].stride % vec == 0;
  }
  return result;
}

// A partial result: a sum in double, or one to three numbers of the accumulator's type.
inline int64_t reduction_state_bytes(const ReductionParams& p) {
  const int64_t number = p.dtype == DType::kFloat64 ? 8 : 4;
  if (p.kind == ReductionKind::kSum || p.kind == ReductionKind::kMean) return 8;
  const bool is_var = p.kind == ReductionKind::kVar || p.kind == ReductionKind::kStd;
  return number * (is_var ? 3 : p.kind == ReductionKind::kLogSumExp ? 2 : 1);
}

// Parts of `steps` for each of `items` that fill the GPU about `waves` times.
inline int64_t reduction_splits(int64_t items, int64_t steps, int64_t step_size,
                                const DeviceInfo& device) {
  const int64_t resident = int64_t{device.num_sms} * kReductionBlocksPerSm;
  if (items >= resident) return 1;
  return std::max<int64_t>(1, std::min(resident / items, ceil_div(steps, step_size)));
}

inline void set_reduction_workspace(ReductionPlan& plan, int64_t items, int64_t states_per_item,
                                    const ReductionParams& p) {
  if (plan.splits == 1) return;
  plan.zeroed_bytes = ceil_div<int64_t>(4 * items, 16) * 16;
  plan.workspace_bytes =
      plan.zeroed_bytes + items * plan.splits * states_per_item * reduction_state_bytes(p);
}

inline ReductionPlan choose_reduction_rows(const ReductionParams& p, const DeviceInfo& device) {
  const ReductionLayout& a = p.layout;
  const int64_t size = dtype_size(p.dtype);
  ReductionPlan plan{.path = ReductionPath::kBlocks};
  plan.is_whole_vectors = has_whole_vectors(p);
  // Several runs per row are read by vectors only if all begin and end at boundaries.
  plan.vectorized = a.inner.stride == 1 && (plan.is_whole_vectors || a.reduced.total == 1);
  const int64_t vec = plan.vectorized ? 16 / size : 1;
  // A run that begins between boundaries touches one vector more.
  plan.vectors = ceil_div(a.inner.size + (plan.is_whole_vectors ? 0 : vec - 1), vec);
  const int64_t outputs = a.outputs(), steps = plan.vectors * a.reduced.total;
  const int64_t many = int64_t{device.num_sms} * 32;
  if (a.reduced.total == 1 && plan.vectors <= 32) {
    plan.path = ReductionPath::kGroups;
    while ((int64_t{1} << plan.log_lanes) < plan.vectors) ++plan.log_lanes;
    const int64_t rows = (kReductionThreads >> plan.log_lanes) * kReductionLoads;
    plan.blocks = ceil_div(outputs, rows);
    plan.reason = "short rows, several per warp";
    return plan;
  }
  if (steps <= 256 || (steps <= 1024 && outputs >= many)) {
    plan.path = ReductionPath::kWarps;
    plan.chunk = steps;
    plan.blocks = ceil_div<int64_t>(outputs, kReductionThreads / 32);
    plan.reason = "a warp per row";
    return plan;
  }
  constexpr int64_t kStep = kReductionThreads * kReductionLoads;
  plan.splits = reduction_splits(outputs, steps, kStep / 2, device);
  plan.chunk =
      ceil_div(ceil_div(steps, plan.splits), int64_t{kReductionThreads}) * kReductionThreads;
  plan.splits = ceil_div(steps, plan.chunk);
  plan.blocks = outputs * plan.splits;
  set_reduction_workspace(plan, outputs, 1, p);
  plan.reason = plan.splits > 1 ? "several blocks per row" : "a block per row";
  return plan;
}

inline ReductionPlan choose_reduction_columns(const ReductionParams& p, const DeviceInfo& device) {
  const ReductionLayout& a = p.layout;
  ReductionPlan plan{.path = ReductionPath::kColumns, .vectorized = has_whole_vectors(p)};
  const int64_t per_vector = plan.vectorized ? 16 / dtype_size(p.dtype) : 1;
  const int64_t rows = a.reduced.total;
  plan.vectors = a.kept.total * a.inner.size / per_vector;
  // Threads below each other: as many as rows keep busy, at most 256 / 32, so that 512 bytes lie
  // side by side. Fewer columns leave more threads for rows. Of few rows, merging takes longer than
  // reading, so no more threads than keep the memory busy.
  constexpr int64_t kFewRows = 8 * kReductionLoads, kFewestThreads = 320;  // per SM
  const int64_t most_threads =
      rows > kFewRows ? std::numeric_limits<int64_t>::max() : device.num_sms * kFewestThreads;
  int log_down = 0;
  while (log_down < 3 && (int64_t{kReductionLoads} << log_down) < rows &&
         plan.vectors << log_down < most_threads) {
    ++log_down;
  }
  plan.log_lanes = 8 - log_down;
  while (plan.log_lanes > 0 && (int64_t{1} << (plan.log_lanes - 1)) >= plan.vectors) {
    --plan.log_lanes;
  }
  const int64_t across = int64_t{1} << plan.log_lanes, down = kReductionThreads / across;
  plan.column_blocks = ceil_div(plan.vectors, across);
  plan.splits = reduction_splits(plan.column_blocks, rows, down * kReductionLoads, device);
  plan.chunk = ceil_div(ceil_div(rows, plan.splits), down) * down;
  plan.splits = ceil_div(rows, plan.chunk);
  plan.blocks = plan.column_blocks * plan.splits;
  set_reduction_workspace(plan, plan.column_blocks, across * per_vector, p);
  plan.reason = plan.splits > 1 ? "several blocks per column" : "a block per column";
  return plan;
}

inline ReductionPlan choose_reduction(const ReductionParams& p, const DeviceInfo& device) {
  return p.layout.is_rows ? choose_reduction_rows(p, device) : choose_reduction_columns(p, device);
}

inline std::string describe(const ReductionPlan& plan) {
  std::string text = plan.path == ReductionPath::kColumns ? "columns: " : "rows: ";
  text += plan.reason;
  if (plan.splits > 1) text += " (" + std::to_string(plan.splits) + ")";
  return text + (plan.vectorized ? ", 16-byte loads" : ", one element per load");
}

void reduction_cpu(const ReductionParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes. The launch zeroes the tickets.
void launch_reduction(const ReductionParams& params, const ReductionPlan& plan, void* workspace,
                      cudaStream_t stream);
#endif

}  // namespace warpwright
