// Column sums in a fixed order of a matrix that is read, or made, on the way: one read of each
// operand.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch_cluster.h"
#include "host/switch.h"
#include "ops/linear/linear.h"

namespace warpwright {

// A Source has
//   static constexpr int kMinBlocks;  // that an SM must hold; 0: as many as ptxas thinks best
//   struct Loaded;                                                  // kVec columns of a row
//   __device__ Loaded load(int64_t row, int64_t col) const;
//   __device__ void values(const Loaded&, int64_t row, int64_t col, Accum<T> (&v)[kVec]) const;
// This one is a matrix with any strides; kVec > 1 needs contiguous rows of whole, aligned vectors.
template <class T, int kVec>
struct MatrixColumns {
  static constexpr int kMinBlocks = 0;
  using Loaded = Vec<T, kVec>;
  const T* matrix;
  int64_t stride_row;
  int64_t stride_col;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t col) const {
    return load_vec<kVec>(matrix + row * stride_row + col * stride_col);
  }
  __device__ __forceinline__ void values(const Loaded& loaded, int64_t, int64_t,
                                         Accum<T> (&v)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = convert<Accum<T>>(loaded.data[i]);
  }
};

// source: (rows, cols). sums: (splits, cols), or null: the source is walked for what it does.
// Grid: block = (split, group of kLanes * kVec columns), columns fastest. A thread adds every
// kRowLanes-th row of its split; the row lanes are then added as a tree.
template <class Out, class Acc, int kVec, int kLanes, class Source>
__global__ void __launch_bounds__(kColumnSumThreads, Source::kMinBlocks)
    column_sum_kernel(Source source, int64_t rows, int64_t cols, int splits, Out* sums,
                      bool beside_previous) {
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
    // cols is a multiple of kVec, so that no vector crosses the last column.
    int64_t row = split * rows / splits + row_lane;
    for (; row + (kUnroll - 1) * kRowLanes < row_end; row += kUnroll * kRowLanes) {
      typename Source::Loaded loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[u] = source.load(row + u * kRowLanes, col);
      // Pairs first: a shorter chain of roundings.
      Acc pair[kVec], next[kVec], pairs[kVec];
#pragma unroll
      for (int u = 0; u < kUnroll; u += 2) {
        source.values(loaded[u], row + u * kRowLanes, col, pair);
        source.values(loaded[u + 1], row + (u + 1) * kRowLanes, col, next);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          pair[i] += next[i];
          pairs[i] = u == 0 ? pair[i] : pairs[i] + pair[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += pairs[i];
    }
    for (; row < row_end; row += kRowLanes) {
      Acc v[kVec];
      source.values(source.load(row, col), row, col, v);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += v[i];
    }
  }
  if (beside_previous) outlast_previous_kernel();
  if (sums == nullptr) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) shared[row_lane][lane * kVec + i] = sum[i];
  __syncthreads();
  const int64_t out_col = first_col + threadIdx.x;
  if (threadIdx.x >= kLanes * kVec || out_col >= cols) return;
  const Acc total = tree_sum<kRowLanes>([&](int r) { return shared[r][threadIdx.x]; });
  sums[split * cols + out_col] = convert<Out>(total);
}

// make_source.operator()<kVec>() gives the Source for that width. A null p.sum: no sums.
template <class T, class MakeSource>
void launch_column_sum_of(const ColumnSumParams& p, const ColumnSumConfig& config,
                          cudaStream_t stream, MakeSource&& make_source) {
  using Acc = Accum<T>;
  const bool split = config.splits > 1 && p.sum != nullptr;
  auto run = [&]<class Out, int kVec, int kLanes>(auto source, int64_t rows, int splits, Out* sums,
                                                  bool beside = false) {
    const int64_t blocks = ceil_div<int64_t>(p.cols, kLanes * kVec) * splits;
    launch_beside(beside, column_sum_kernel<Out, Acc, kVec, kLanes, decltype(source)>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kColumnSumThreads), /*cluster=*/1, 0,
                  stream, source, rows, p.cols, splits, sums, beside);
  };
  for_bool(config.wide, [&]<bool kWide>() {
    for_bool(config.small, [&]<bool kSmall>() {
      constexpr int kVec = kWide ? kVecSize<T> : 1;
      constexpr int kLanes = kSmall ? 8 : 32;
      const auto source = make_source.template operator()<kVec>();
      if (split) {
        run.template operator()<Acc, kVec, kLanes>(
            source, p.rows, config.splits, static_cast<Acc*>(p.workspace), p.beside_previous);
      } else {
        run.template operator()<T, kVec, kLanes>(source, p.rows, config.splits,
                                                 static_cast<T*>(p.sum), p.beside_previous);
      }
    });
  });
  if (split) {
    const MatrixColumns<Acc, 1> parts{static_cast<const Acc*>(p.workspace), p.cols, 1};
    run.template operator()<T, 1, 32>(parts, config.splits, 1, static_cast<T*>(p.sum));
  }
}

}  // namespace warpwright
