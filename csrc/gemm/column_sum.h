// Column sums of a matrix in a fixed order: parameters, and the number of parts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "gemm/params.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// sum[col] = sum over rows of matrix[row * stride_row + col * stride_col].
struct ColumnSumParams {
  DType dtype;
  int64_t rows;
  int64_t cols;
  const void* matrix;
  int64_t stride_row;
  int64_t stride_col;
  void* sum;              // (cols)
  bool wide_sum = false;  // sum has the accumulator's type, as with GemmParams::accum_d
  bool overlaps_previous = false;
};

struct ColumnSumPlan {
  bool vectorized;  // 16-byte accesses along a row
  int lanes;        // threads across, 8 or 32
  int splits;       // runs of rows, summed in order by a second kernel
  int64_t workspace_bytes;
};

constexpr int kColumnSumThreads = 256;

struct ColumnSumOptions {
  uintptr_t other_addresses =
      0;  // or-ed addresses of row-major dense matrices that are read or written too
  int ctas_per_sm = 2;
  int64_t accum_size = 0;  // bytes per element of a part; 0: the dtype's accumulator
};

inline ColumnSumPlan choose_column_sum(const ColumnSumParams& p, const DeviceInfo& device,
                                       const ColumnSumOptions& options = {}) {
  ColumnSumPlan plan{};
  const int64_t size = dtype_size(p.dtype);
  plan.vectorized = p.stride_col == 1 && p.stride_row * size % 16 == 0 && p.cols * size % 16 == 0 &&
                    (reinterpret_cast<uintptr_t>(p.matrix) | options.other_addresses) % 16 == 0;
  const int64_t vec = plan.vectorized ? 16 / size : 1;
  plan.lanes = p.cols <= 8 * vec * 2 ? 8 : 32;
  const int64_t blocks = ceil_div(p.cols, plan.lanes * vec);
  // A few CTAs per SM hide the latency, as long as each thread still has 8 rows to keep in flight.
  const int64_t rows_at_once = kColumnSumThreads / plan.lanes;
  const int64_t wanted =
      std::max<int64_t>(1, options.ctas_per_sm * device.num_sms / std::max<int64_t>(1, blocks));
  plan.splits = static_cast<int>(std::clamp<int64_t>(p.rows / (8 * rows_at_once), 1, wanted));
  const int64_t accum_size = options.accum_size > 0       ? options.accum_size
                             : p.dtype == DType::kFloat64 ? 8
                                                          : 4;
  plan.workspace_bytes = plan.splits > 1 ? plan.splits * p.cols * accum_size : 0;
  return plan;
}

inline std::string describe(const ColumnSumPlan& plan) {
  return std::string("column sums, ") +
         (plan.vectorized ? "16-byte accesses" : "element accesses") + ", rows in " +
         std::to_string(plan.splits) + " split(s)";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_column_sum(const ColumnSumParams& params, const ColumnSumPlan& plan, void* workspace,
                       cudaStream_t stream);
#endif

}  // namespace warpwright
