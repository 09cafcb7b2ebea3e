// Column sums, in a fixed order, of a matrix that a Source reads or computes. Bound: one read of
// each operand.
//
// A Source has
//   static constexpr int kMinBlocks;  // resident blocks per SM; 0: ptxas decides
//   struct Loaded;                                                  // kVec columns of a row
//   __device__ Loaded load(int64_t row, int64_t col) const;
//   __device__ void values(const Loaded&, int64_t row, int64_t col, Acc (&v)[kVec]) const;
// load() of several rows comes before their values(), so that the reads overlap. For example the
// sums of a product of two dense matrices, element by element:
//
//   template <class T, int kVec>
//   struct ProductColumns {
//     static constexpr int kMinBlocks = 0;
//     struct Loaded { Vec<T, kVec> a, b; };
//     const T *a, *b;
//     int64_t cols;
//     __device__ Loaded load(int64_t row, int64_t col) const {
//       return {load_vec<kVec>(a + row * cols + col), load_vec<kVec>(b + row * cols + col)};
//     }
//     __device__ void values(const Loaded& x, int64_t, int64_t, Accum<T> (&v)[kVec]) const {
//       for (int i = 0; i < kVec; ++i) v[i] = convert<Accum<T>>(x.a[i]) *
//       convert<Accum<T>>(x.b[i]);
//     }
//   };
#pragma once

#include "common/switch.h"
#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "gemm/column_sum.h"
#include "host/launch_cluster.h"

namespace warpwright {

// A matrix with any strides; kVec > 1 needs contiguous rows of whole, aligned vectors.
template <class T, int kVec, class Acc = Accum<T>>
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
                                         Acc (&v)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = convert<Acc>(loaded.data[i]);
  }
};

// source: (rows, cols). sums: (splits, cols), or null: the source is read for its side effects.
// Grid: block = (split, group of kLanes * kVec columns), columns fastest. A thread adds every
// kRowLanes-th row of its split; the row lanes are then added as a tree.
template <class Out, class Acc, int kVec, int kLanes, class Source>
__global__ void __launch_bounds__(kColumnSumThreads, Source::kMinBlocks)
    column_sum_kernel(Source source, int64_t rows, int64_t cols, int splits, Out* sums,
                      bool overlaps_previous) {
  constexpr int kRowLanes = kColumnSumThreads / kLanes;
  constexpr int kUnroll = 4;  // independent loads per thread
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
  if (overlaps_previous) outlast_previous_kernel();
  if (sums == nullptr) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) shared[row_lane][lane * kVec + i] = sum[i];
  __syncthreads();
  const int64_t out_col = first_col + threadIdx.x;
  if (threadIdx.x >= kLanes * kVec || out_col >= cols) return;
  const Acc total = tree_sum<kRowLanes>([&](int r) { return shared[r][threadIdx.x]; });
  sums[split * cols + out_col] = convert<Out>(total);
}

template <class Out, class Acc, int kVec, int kLanes, class Source>
void launch_column_sum_kernel(const Source& source, int64_t rows, int64_t cols, int splits,
                              Out* sums, bool overlap, cudaStream_t stream) {
  const int64_t blocks = ceil_div<int64_t>(cols, kLanes * kVec) * splits;
  launch_overlapping(overlap, column_sum_kernel<Out, Acc, kVec, kLanes, Source>,
                     dim3(static_cast<unsigned>(blocks)), dim3(kColumnSumThreads), /*cluster=*/1, 0,
                     stream, source, rows, cols, splits, sums, overlap);
}

// parts: (count, cols), dense.
template <class T, class Acc>
void launch_part_sums(const Acc* parts, int count, int64_t cols, T* sums, cudaStream_t stream) {
  launch_column_sum_kernel<T, Acc, 1, 32>(MatrixColumns<Acc, 1>{parts, cols, 1}, count, cols,
                                          /*splits=*/1, sums, /*overlap=*/false, stream);
}

// make_source.operator()<kVec>() gives the Source for that width. A null p.sum: no sums.
template <class T, class Acc = Accum<T>, class MakeSource>
void launch_column_sum_of(const ColumnSumParams& p, const ColumnSumPlan& plan, void* workspace,
                          cudaStream_t stream, MakeSource&& make_source) {
  const bool split = plan.splits > 1 && p.sum != nullptr;
  for_bool(plan.vectorized, [&]<bool kVectorized>() {
    for_int<8, 32>(plan.lanes, [&]<int kLanes>() {
      constexpr int kVec = kVectorized ? kVecSize<T> : 1;
      const auto source = make_source.template operator()<kVec>();
      if (split || (p.wide_sum && p.sum != nullptr)) {
        launch_column_sum_kernel<Acc, Acc, kVec, kLanes>(
            source, p.rows, p.cols, plan.splits, static_cast<Acc*>(split ? workspace : p.sum),
            p.overlaps_previous, stream);
      } else {
        launch_column_sum_kernel<T, Acc, kVec, kLanes>(source, p.rows, p.cols, plan.splits,
                                                       static_cast<T*>(p.sum), p.overlaps_previous,
                                                       stream);
      }
    });
  });
  if (!split) return;
  const auto* parts = static_cast<const Acc*>(workspace);
  if (p.wide_sum) {
    launch_part_sums(parts, plan.splits, p.cols, static_cast<Acc*>(p.sum), stream);
  } else {
    launch_part_sums(parts, plan.splits, p.cols, static_cast<T*>(p.sum), stream);
  }
}

}  // namespace warpwright
