// Column sums of a matrix with any strides: the bias gradient.
#include "gemm/column_sum.cuh"

namespace warpwright {

void launch_column_sum(const ColumnSumParams& p, const ColumnSumPlan& plan, void* workspace,
                       cudaStream_t stream) {
  if (p.cols == 0) return;
  for_dtype(p.dtype, [&]<class T>() {
    launch_column_sum_of<T>(p, plan, workspace, stream, [&]<int kVec>() {
      return MatrixColumns<T, kVec>{static_cast<const T*>(p.matrix), p.stride_row, p.stride_col};
    });
  });
}

}  // namespace warpwright
