// linear(x, W, b) = x W^T + b as three matrix products D = A B^T on one mainloop. Of row-major x
// and W:
//
//   fwd    y  (M, O) = x W^T + b    A = x    (m, k)    B = W    (n, k)    "NT"
//   dgrad  dx (M, I) = dy W         A = dy   (m, k)    B = W^T  (n, k)    "NN"
//   wgrad  dW (O, I) = dy^T x       A = dy^T (m, k)    B = x^T  (n, k)    "TN"
//
// and db (O) = column sums of dy. Row- and column-major operands are read where they lie.
// Bound: 2 M O I FLOPs each on the tensor cores, unless one extent is small.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/gemm.h"
#include "ops/linear/linear_head.h"
#include "gemm/params.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// ---- column sum ----

struct ColumnSumConfig {
  bool wide;   // 16-byte accesses along a row
  bool small;  // 8 threads across instead of 32
  int splits;  // runs of rows, summed in order by a second kernel
};

constexpr int kColumnSumThreads = 256;

inline int column_sum_cols(const ColumnSumConfig& config, DType dtype) {
  return static_cast<int>((config.small ? 8 : 32) * (config.wide ? 16 / dtype_size(dtype) : 1));
}

// other_addresses: or-ed, of row-major dense matrices that are walked along with it.
inline ColumnSumConfig choose_column_sum_config(const ColumnSumParams& p, const DeviceInfo& device,
                                                uintptr_t other_addresses = 0,
                                                int ctas_per_sm = 2) {
  ColumnSumConfig config{};
  const int64_t size = dtype_size(p.dtype);
  config.wide = p.stride_col == 1 && p.stride_row * size % 16 == 0 && p.cols * size % 16 == 0 &&
                (reinterpret_cast<uintptr_t>(p.matrix) | other_addresses) % 16 == 0;
  config.small = p.cols <= 8 * (config.wide ? 16 / size : 1) * 2;
  const int64_t cols = column_sum_cols(config, p.dtype);
  const int64_t blocks = ceil_div(p.cols, cols);
  // A few CTAs an SM hide the latency, as long as each thread still has 8 rows to keep in flight.
  const int64_t rows_at_once = kColumnSumThreads / (config.small ? 8 : 32);
  const int64_t wanted =
      std::max<int64_t>(1, ctas_per_sm * device.num_sms / std::max<int64_t>(1, blocks));
  config.splits = static_cast<int>(std::clamp<int64_t>(p.rows / (8 * rows_at_once), 1, wanted));
  return config;
}

inline int64_t column_sum_workspace_bytes(const ColumnSumParams& p, const ColumnSumConfig& config) {
  const int64_t accum_size = p.dtype == DType::kFloat64 ? 8 : 4;
  return config.splits > 1 ? config.splits * p.cols * accum_size : 0;
}

// ---- entries ----

void gemm_cpu(const GemmParams& params);
void column_sum_cpu(const ColumnSumParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_gemm(const GemmParams& params, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_few_rows(const GemmParams& params, cudaStream_t stream);
void launch_gemm_outer_product(const GemmParams& params, const GemmConfig& config,
                               cudaStream_t stream);
void launch_linear_head(const GemmParams& params, const GemmConfig& config, cudaStream_t stream);
void launch_linear_head_gradients(const LinearHeadGradients& params, cudaStream_t stream);
void launch_column_sum(const ColumnSumParams& params, const ColumnSumConfig& config,
                       cudaStream_t stream);
#endif

}  // namespace warpwright
