// Scans along one dimension: y_t = y_{t-1} + x_t from the first step to the last, or backwards; the
// same for products and log-sum-exps. Memory-bound: 2E bytes (E = bytes of the output). The
// gradients are scans in the other direction.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class ScanKind : int8_t { kSum, kProduct, kLogSumExp };

struct ScanParams {
  ScanKind kind = ScanKind::kSum;
  DType dtype;  // floating, or for sums and products int64
  bool is_reversed;
  int64_t outer = 1, length = 1, inner = 1;  // of dense tensors; the scan is along `length`
  const void* input;
  void* output;
  // h_t = gate_t h_{t-1} + input_t
  const void* gate = nullptr;     // null: a sum
  const void* initial = nullptr;  // (outer, inner): h before the first step; null: zero
  bool is_shifted = false;        // each step has the gate of the step before it in the scan
  // `gate` holds levels, whose differences are the gates' logarithms:
  // gate_t = exp(level_t - level_{t-1}), zero between equal infinities. There is no initial state.
  bool is_levels = false;

  int inputs() const { return gate == nullptr ? 1 : 2; }
  // A run of steps is one number or a pair, in units of the data's width: pairs, and products of
  // floats, which are in double, take twice the registers per element.
  int numbers() const {
    const bool in_double = kind == ScanKind::kProduct && dtype == DType::kFloat32;
    return gate != nullptr || kind == ScanKind::kLogSumExp || in_double ? 2 : 1;
  }
};

constexpr int kScanColumnThreads = 256;
constexpr int64_t kScanRowBytes = 32 * 1024;  // of a tile of rows, per number of a run
constexpr int kScanColumnRows = 8;            // per thread and number of a run
constexpr int64_t kScanTicketBytes = 16;
constexpr int kScanGroup = 32;  // tiles of a long row that look back together

// How the GPU cuts a scan. The workspace begins with the ticket. Tiles' words follow, and for
// columns their totals and carries.
struct ScanPlan {
  bool is_rows;     // the dimension is contiguous
  bool look_back;   // a row or column needs more than one tile
  bool vectorized;  // 16-byte accesses
  int64_t blocks;
  // rows
  int rows_per_tile = 0;       // without look-back
  bool whole_vectors = false;  // rows begin at 16-byte boundaries
  int64_t tiles_per_row = 0;   // with look-back
  // columns
  int log_across = 0;         // log2 of the threads over columns
  int64_t column_blocks = 0;  // tiles across
  int64_t tile_rows = 0;      // tiles down
  int64_t vectors = 0;        // of columns
  // with look-back
  int64_t zeroed_bytes = 0;     // the first bytes of the workspace: ticket and flags
  int64_t workspace_bytes = 0;  // all
  const char* reason = "";
};

inline int64_t round_up_to_16(int64_t bytes) { return ceil_div<int64_t>(bytes, 16) * 16; }

inline ScanPlan choose_scan_rows(const ScanParams& p) {
  const int64_t size = dtype_size(p.dtype), vec = 16 / size;
  const int64_t tile = kScanRowBytes / size / p.numbers();
  const auto place = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16; };
  ScanPlan plan{.is_rows = true,
                .look_back = false,
                .vectorized = place(p.input) == place(p.output) &&
                              (p.gate == nullptr || place(p.gate) == place(p.output)),
                .blocks = 0};
  // A row that begins between 16-byte boundaries begins up to vec - 1 elements into its tile.
  const bool is_aligned = place(p.output) == 0 && p.length % vec == 0;
  const int64_t phase = is_aligned ? 0 : vec - 1;
  plan.whole_vectors = is_aligned;
  if (p.length + phase <= tile) {
    plan.rows_per_tile = static_cast<int>((tile - phase) / p.length);
    plan.blocks = ceil_div<int64_t>(p.outer, plan.rows_per_tile);
    plan.reason = "whole rows per block";
    return plan;
  }
  plan.look_back = true;
  plan.tiles_per_row = ceil_div<int64_t>(p.length + phase, tile);
  plan.blocks = p.outer * plan.tiles_per_row;
  // Words of 16 bytes: as many as inputs per tile and per group, and a group's carry.
  const int64_t groups = p.outer * ceil_div(plan.tiles_per_row, int64_t{kScanGroup});
  const int64_t words = p.inputs() * plan.blocks + (p.inputs() + 1) * groups;
  plan.zeroed_bytes = kScanTicketBytes + 16 * words;
  plan.workspace_bytes = plan.zeroed_bytes;
  plan.reason = "tiles of a row in one pass, each after a look back";
  return plan;
}

inline ScanPlan choose_scan_columns(const ScanParams& p) {
  const int64_t size = dtype_size(p.dtype);
  const auto addresses = reinterpret_cast<uintptr_t>(p.input) |
                         reinterpret_cast<uintptr_t>(p.output) |
                         reinterpret_cast<uintptr_t>(p.gate);
  ScanPlan plan{.is_rows = false,
                .look_back = false,
                .vectorized = p.inner * size % 16 == 0 && addresses % 16 == 0,
                .blocks = 0};
  const int64_t vec = plan.vectorized ? 16 / size : 1;
  const int64_t per_thread = kScanColumnRows / p.numbers();
  plan.vectors = p.outer * p.inner / vec;
  // 256 bytes across, or 128 of single floats. Fewer rows leave more threads for columns, and fewer
  // columns more for rows.
  const auto wanted = std::bit_ceil(static_cast<uint64_t>(ceil_div(p.length, per_thread)));
  const auto down = std::min<uint64_t>(wanted, plan.vectorized ? 16 : 8);
  const auto across =
      std::min(kScanColumnThreads / down, std::bit_ceil(static_cast<uint64_t>(plan.vectors)));
  plan.log_across = std::countr_zero(across);
  const int64_t rows = kScanColumnThreads / static_cast<int64_t>(across) * per_thread;
  plan.column_blocks = ceil_div(plan.vectors, static_cast<int64_t>(across));
  plan.tile_rows = ceil_div(p.length, rows);
  plan.blocks = plan.column_blocks * plan.tile_rows;
  plan.look_back = plan.tile_rows > 1;
  plan.reason = "whole columns per block";
  if (plan.look_back) {
    plan.zeroed_bytes = round_up_to_16(kScanTicketBytes + 4 * plan.blocks);
    plan.workspace_bytes =
        plan.zeroed_bytes + (1 + p.inputs()) * 8 * plan.tile_rows * plan.vectors * vec;
    plan.reason = "tiles of a column in one pass, each after a look back";
  }
  return plan;
}

inline ScanPlan choose_scan(const ScanParams& p) {
  return p.inner == 1 ? choose_scan_rows(p) : choose_scan_columns(p);
}

inline std::string describe(const ScanPlan& plan) {
  return std::string(plan.is_rows ? "rows: " : "columns: ") + plan.reason +
         (plan.vectorized ? ", 16-byte accesses" : ", one element per access");
}

void scan_cpu(const ScanParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes. The launch zeroes the part that its kernels read first.
void launch_scan(const ScanParams& params, const ScanPlan& plan, void* workspace,
                 cudaStream_t stream);
#endif

}  // namespace warpwright
