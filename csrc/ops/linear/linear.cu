// Dispatch of the matrix products by element type, and the bias gradient: column sums of dy, one
// read of it, partial sums in a fixed order.
#include "ops/linear/linear_portable.cuh"
#include "ops/linear/linear_sm90.h"

namespace warpwright {
namespace {

// matrix: (rows, cols) with any strides; kVec > 1 needs contiguous rows of whole,
// aligned vectors.
// sums: (splits, cols).
// Grid: block = (split, group of kLanes * kVec columns), columns fastest. A thread adds every
// kRowLanes-th row of its split; the row lanes are then added in order of their number.
template <class T, int kVec, int kLanes>
__global__ void __launch_bounds__(kColumnSumThreads)
    column_sum_kernel(const T* matrix, int64_t rows, int64_t cols, int64_t stride_row,
                      int64_t stride_col, int splits, MatrixOutput<T> output, Accum<T>* parts) {
  using Acc = Accum<T>;
  constexpr int kRowLanes = kColumnSumThreads / kLanes;
  constexpr int kUnroll = 4;  // independent loads of a thread
  __shared__ Acc shared[kRowLanes][kLanes * kVec];

  const int64_t col_blocks = ceil_div<int64_t>(cols, kLanes * kVec);
  const int64_t split = blockIdx.x / col_blocks;
  const int64_t first_col = (blockIdx.x - split * col_blocks) * (kLanes * kVec);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int row_lane = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t col = first_col + lane * kVec;
  const int64_t row_end = (split + 1) * rows / splits;

  Acc sum[kVec] = {};
  if (col < cols) {
    auto add = [&](const Vec<T, kVec>& v) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += convert<Acc>(v.data[i]);
    };
    int64_t row = split * rows / splits + row_lane;
    const T* source = matrix + row * stride_row + col * stride_col;
    // cols is a multiple of kVec, so that no vector crosses the last column.
    for (; row + (kUnroll - 1) * kRowLanes < row_end; row += kUnroll * kRowLanes) {
      Vec<T, kVec> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        loaded[u] = load_vec<kVec>(source + u * kRowLanes * stride_row);
      }
      // Pairs first: a shorter chain of roundings.
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        auto value = [&](int u) { return convert<Acc>(loaded[u].data[i]); };
        sum[i] += (value(0) + value(1)) + (value(2) + value(3));
      }
      source += kUnroll * kRowLanes * stride_row;
    }
    for (; row < row_end; row += kRowLanes, source += kRowLanes * stride_row) {
      add(load_vec<kVec>(source));
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) shared[row_lane][lane * kVec + i] = sum[i];
  __syncthreads();
  const int64_t out_col = first_col + threadIdx.x;
  if (threadIdx.x >= kLanes * kVec || out_col >= cols) return;
  Acc partial[kRowLanes];
#pragma unroll
  for (int r = 0; r < kRowLanes; ++r) partial[r] = shared[r][threadIdx.x];
#pragma unroll
  for (int width = kRowLanes / 2; width > 0; width /= 2) {
#pragma unroll
    for (int r = 0; r < width; ++r) partial[r] += partial[r + width];
  }
  const Acc total = partial[0];
  if (splits == 1) {
    output.pointer[out_col] = convert<T>(total);
  } else {
    parts[split * cols + out_col] = total;
  }
}

}  // namespace

void launch_gemm(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return;
  if (config.path == GemmPath::kSm90) return launch_gemm_sm90(p, config, stream);
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
    using Acc = Accum<T>;
    const MatrixOutput<T> output{static_cast<T*>(p.sum), nullptr, 1, p.cols, p.cols, false};
    const int64_t blocks =
        ceil_div<int64_t>(p.cols, column_sum_cols(config, p.dtype)) * config.splits;
    for_bool(config.wide, [&]<bool kWide>() {
      for_bool(config.small, [&]<bool kSmall>() {
        launch(column_sum_kernel < T, kWide ? kVecSize<T> : 1, kSmall ? 8 : 32 >,
               dim3(static_cast<unsigned>(blocks)), dim3(kColumnSumThreads), 0, stream,
               static_cast<const T*>(p.matrix), p.rows, p.cols, p.stride_row, p.stride_col,
               config.splits, output, static_cast<Acc*>(p.workspace));
      });
    });
    if (config.splits > 1) {
      const int64_t chunks = ceil_div<int64_t>(p.cols, MatrixOutput<T>::kVec);
      launch(split_k_reduce_kernel<Acc, MatrixOutput<T>>,
             dim3(static_cast<unsigned>(ceil_div<int64_t>(chunks, kReduceThreads))),
             dim3(kReduceThreads), 0, stream, static_cast<const Acc*>(p.workspace), config.splits,
             int64_t{1}, p.cols, output);
    }
  });
}

}  // namespace warpwright
