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

// Groups of threads that share the parts of a sum. One thread per sum would load its parts a few at
// a time, so few sums of many parts would wait for one load after the other on few SMs.
inline int reduce_groups(int64_t sums, int parts) {
  constexpr int kMost = 8, kFewest = 4;  // groups, parts of a group
  constexpr int64_t kFillingThreads = int64_t{256} * kReduceThreads;
  int groups = 1;
  while (groups < kMost && sums * groups < kFillingThreads && parts >= 2 * groups * kFewest) {
    groups *= 2;
  }
  return groups;
}

inline int64_t reduce_blocks(int64_t sums, int groups) {
  return ceil_div<int64_t>(sums, kReduceThreads / groups);
}

// A thread's sum and its run of the parts. The threads of a group have neighbouring sums.
struct ReduceShare {
  int sums;  // of a block
  int first_part, end_part;

  __device__ __forceinline__ ReduceShare(int groups, int parts) : sums(kReduceThreads / groups) {
    const int group = threadIdx.x / sums;
    first_part = parts * group / groups;
    end_part = parts * (group + 1) / groups;
  }
  __device__ __forceinline__ int64_t sum(unsigned block) const {
    return int64_t{block} * sums + threadIdx.x % sums;
  }
  __device__ __forceinline__ bool is_first_group() const {
    return static_cast<int>(threadIdx.x) < sums;
  }

  // The first group gets the sum over all groups, in their order. All threads of the block must
  // call.
  template <int kCount, class Acc>
  __device__ __forceinline__ void add_groups(Acc (&sum)[kCount]) const {
    if (sums == kReduceThreads) return;
    __shared__ Acc shared[kCount][kReduceThreads];
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared[i][threadIdx.x] = sum[i];
    __syncthreads();
    if (!is_first_group()) return;
    for (int other = threadIdx.x + sums; other < kReduceThreads; other += sums) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += shared[i][other];
    }
  }
};

// One number per row, in parts.
template <class Acc, class T>
struct RowSumParts {
  const Acc* parts = nullptr;  // (count, rows)
  T* sums = nullptr;           // (rows); null: there are none
  int count = 0;
  int64_t rows = 0;

  int groups() const { return reduce_groups(rows, count); }
  int64_t blocks() const { return sums == nullptr ? 0 : reduce_blocks(rows, groups()); }

  // Block `block` of blocks(). All its threads must call.
  __device__ __forceinline__ void add_up(unsigned block, int groups) const {
    const ReduceShare share(groups, count);
    const int64_t row = share.sum(block);
    Acc sum[1] = {};
    if (row < rows) {
#pragma unroll 8
      for (int part = share.first_part; part < share.end_part; ++part) {
        sum[0] += parts[part * rows + row];
      }
    }
    share.add_groups(sum);
    if (row < rows && share.is_first_group()) sums[row] = convert<T>(sum[0]);
  }
};

// Grid: row_sums.blocks().
template <class Acc, class T>
__global__ void __launch_bounds__(kReduceThreads)
    add_row_sums_kernel(RowSumParts<Acc, T> row_sums, int groups) {
  wait_for_previous_kernel();
  let_next_kernel_start();  // an independent one
  row_sums.add_up(blockIdx.x, groups);
}

template <class Acc, class T>
void launch_add_row_sums(const RowSumParts<Acc, T>& row_sums, cudaStream_t stream) {
  launch_dependent(add_row_sums_kernel<Acc, T>, dim3(static_cast<unsigned>(row_sums.blocks())),
                   dim3(kReduceThreads), 0, stream, row_sums, row_sums.groups());
}

// parts: (splits, rows, cols), row-major, 16-byte aligned. Always sums in the same order, so that
// the result does not depend on which CTA came first. A sum is Output::kVec columns of a row of D.
// Grid: d_blocks blocks for D, then those of the row sums.
template <class Acc, class Output, class T>
__global__ void __launch_bounds__(kReduceThreads)
    split_k_reduce_kernel(const Acc* parts, int splits, int64_t rows, int64_t cols, Output output,
                          int groups, unsigned d_blocks, RowSumParts<Acc, T> row_sums,
                          int row_groups) {
  constexpr int kVec = Output::kVec;
  constexpr int kRead = kVec < kVecSize<Acc> ? kVec : kVecSize<Acc>;
  wait_for_previous_kernel();
  let_next_kernel_start();  // an independent one
  if (blockIdx.x >= d_blocks) return row_sums.add_up(blockIdx.x - d_blocks, row_groups);
  const ReduceShare share(groups, splits);
  const int64_t chunks = ceil_div<int64_t>(cols, kVec);
  const int64_t chunk = share.sum(blockIdx.x);
  const int64_t row = chunk / chunks;
  const int64_t col = (chunk - row * chunks) * kVec;
  const Acc* part = parts + row * cols + col;
  Acc sum[kVec] = {};
  if (row < rows && cols % kVec == 0) {
#pragma unroll 4
    for (int split = share.first_part; split < share.end_part; ++split) {
#pragma unroll
      for (int i = 0; i < kVec; i += kRead) {
        const auto v = load_vec<kRead>(part + split * rows * cols + i);
#pragma unroll
        for (int e = 0; e < kRead; ++e) sum[i + e] += v.data[e];
      }
    }
  } else if (row < rows) {
    for (int split = share.first_part; split < share.end_part; ++split) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (col + i < cols) sum[i] += part[split * rows * cols + i];
      }
    }
  }
  share.add_groups(sum);
  if (row < rows && share.is_first_group()) output.store(row, col, sum);
}

// Launched after the kernel that writes the parts. That kernel lets it start only as its blocks
// end: if started earlier, it would hold SMs that the kernel's remaining blocks need.
template <class Acc, class Output, class T = Acc>
void launch_split_k_reduce(const void* parts, int splits, int64_t rows, int64_t cols,
                           const Output& output, cudaStream_t stream,
                           const RowSumParts<Acc, T>& row_sums = {}) {
  const int64_t chunks = rows * ceil_div<int64_t>(cols, Output::kVec);
  const int groups = reduce_groups(chunks, splits);
  const auto d_blocks = static_cast<unsigned>(reduce_blocks(chunks, groups));
  launch_dependent(split_k_reduce_kernel<Acc, Output, T>,
                   dim3(d_blocks + static_cast<unsigned>(row_sums.blocks())), dim3(kReduceThreads),
                   0, stream, static_cast<const Acc*>(parts), splits, rows, cols, output, groups,
                   d_blocks, row_sums, row_sums.groups());
}

}  // namespace warpwright
