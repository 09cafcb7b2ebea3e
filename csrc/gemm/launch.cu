// Dispatch of the matrix products by element type, and the bias gradient: the column sums of dy.
#include "gemm/column_sum.cuh"
#include "gemm/kernel_portable.cuh"
#include "gemm/instances/sm90.h"

namespace warpwright {
void launch_gemm(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  if (is_empty(p)) return;
  if (config.path == GemmPath::kSm90) return launch_gemm_sm90(p, config, stream);
  if (config.path == GemmPath::kFewRows) return launch_gemm_few_rows(p, stream);
  if (config.path == GemmPath::kHead) return launch_linear_head(p, config, stream);
  if (config.path == GemmPath::kOuterProduct) return launch_gemm_outer_product(p, config, stream);
  if (p.accumulate && !p.accum_d) {
    throw std::logic_error("warpwright: linear: only the sm_90a kernels add to 16-bit values");
  }
  switch (config.kind) {
    case GemmKind::k16Bit:
      return p.dtype == DType::kBFloat16 ? launch_gemm_bf16(p, config, stream)
                                         : launch_gemm_fp16(p, config, stream);
    case GemmKind::kTf32:
      return launch_gemm_tf32(p, config, stream);
    case GemmKind::kFp32:
      return launch_gemm_fp32(p, config, stream);
    case GemmKind::kFp64:
      return launch_gemm_fp64(p, config, stream);
  }
}

void launch_column_sum(const ColumnSumParams& p, const ColumnSumConfig& config,
                       cudaStream_t stream) {
  if (p.cols == 0) return;
  for_dtype(p.dtype, [&]<class T>() {
    launch_column_sum_of<T>(p, config, stream, [&]<int kVec>() {
      return MatrixColumns<T, kVec>{static_cast<const T*>(p.matrix), p.stride_row, p.stride_col};
    });
  });
}

}  // namespace warpwright
