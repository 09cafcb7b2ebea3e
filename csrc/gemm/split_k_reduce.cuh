// The second kernel of a product whose k is split: adds the parts in a fixed order and hands the
// sums to an Output (tile/epilogue.cuh).
#pragma once

#include <cstdint>

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/types.cuh"
#include "device/vec.cuh"
#include "host/launch.h"

namespace warpwright {

constexpr int kReduceThreads = 256;

// One number per row, in parts.
template <class Acc, class T>
struct RowSumParts {
  const Acc* parts = nullptr;  // (count, rows)
  T* sums = nullptr;           // (rows); null: there are none
  int count = 0;
  int64_t rows = 0;

  __device__ __forceinline__ void add_up(int64_t row) const {
    if (row >= rows) return;
    Acc sum(0);
#pragma unroll 8
    for (int part = 0; part < count; ++part) sum += parts[part * rows + row];
    sums[row] = convert<T>(sum);
  }
};

// Grid: one thread per row.
template <class Acc, class T>
__global__ void __launch_bounds__(kReduceThreads)
    add_row_sums_kernel(RowSumParts<Acc, T> row_sums) {
  wait_for_previous_kernel();
  let_next_kernel_start();  // an independent one
  row_sums.add_up(int64_t{blockIdx.x} * kReduceThreads + threadIdx.x);
}

// parts: (splits, rows, cols), row-major, 16-byte aligned. Sums splits 0, 1, 2, ... in order, so
// that the result does not depend on which CTA came first. Grid: one thread per Output::kVec
// columns of a row of D, in d_blocks blocks; if there are row sums, then one thread per row.
template <class Acc, class Output, class T>
__global__ void __launch_bounds__(kReduceThreads)
    split_k_reduce_kernel(const Acc* parts, int splits, int64_t rows, int64_t cols, Output output,
                          unsigned d_blocks, RowSumParts<Acc, T> row_sums) {
  constexpr int kVec = Output::kVec;
  constexpr int kRead = kVec < kVecSize<Acc> ? kVec : kVecSize<Acc>;
  wait_for_previous_kernel();
  let_next_kernel_start();  // an independent one
  if (blockIdx.x >= d_blocks) {
    row_sums.add_up(int64_t{blockIdx.x - d_blocks} * kReduceThreads + threadIdx.x);
    return;
  }
  const int64_t chunks = ceil_div<int64_t>(cols, kVec);
  const int64_t chunk = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  const int64_t row = chunk / chunks;
  const int64_t col = (chunk - row * chunks) * kVec;
  if (row >= rows) return;
  const Acc* part = parts + row * cols + col;
  Acc sum[kVec] = {};
  if (cols % kVec == 0) {
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int i = 0; i < kVec; i += kRead) {
        const auto v = load_vec<kRead>(part + split * rows * cols + i);
#pragma unroll
        for (int e = 0; e < kRead; ++e) sum[i + e] += v.data[e];
      }
    }
  } else {
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (col + i < cols) sum[i] += part[split * rows * cols + i];
      }
    }
  }
  output.store(row, col, sum);
}

// Launched after the kernel that writes the parts. That kernel lets it start only as its blocks
// end: if started earlier, it would hold SMs that the kernel's remaining blocks need.
template <class Acc, class Output, class T = Acc>
void launch_split_k_reduce(const void* parts, int splits, int64_t rows, int64_t cols,
                           const Output& output, cudaStream_t stream,
                           const RowSumParts<Acc, T>& row_sums = {}) {
  const int64_t chunks = rows * ceil_div<int64_t>(cols, Output::kVec);
  const auto d_blocks = static_cast<unsigned>(ceil_div<int64_t>(chunks, kReduceThreads));
  const int64_t row_blocks =
      row_sums.sums == nullptr ? 0 : ceil_div<int64_t>(row_sums.rows, kReduceThreads);
  launch_dependent(split_k_reduce_kernel<Acc, Output, T>,
                   dim3(d_blocks + static_cast<unsigned>(row_blocks)), dim3(kReduceThreads), 0,
                   stream, static_cast<const Acc*>(parts), splits, rows, cols, output, d_blocks,
                   row_sums);
}

}  // namespace warpwright
