// Reductions whose innermost axis is kept. The threads of a block form a grid: x walks
// columns, y walks reduced rows. A thread loads up to 8 rows at once.
#pragma once

#include "ops/reduction/cuda/operands.cuh"

namespace warpwright {

// The parts of a thread's columns, which all have the same count.
template <class Op, int kVec>
struct ColumnParts {
  typename Op::State state[kVec];
  typename Op::Compute count = 0;

  __device__ ColumnParts() {
#pragma unroll
    for (int j = 0; j < kVec; ++j) state[j] = Op::identity();
  }
  template <int kCount, class F>
  __device__ __forceinline__ void absorb(const F& value) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      Op::template absorb<kCount>(state[j], count, [&](int i) { return value(i, j); });
    }
    if constexpr (Op::kCounts) count += kCount;
  }
  __device__ __forceinline__ ColumnParts<typename Op::Merging, kVec> for_merging() const {
    ColumnParts<typename Op::Merging, kVec> result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) result.state[j] = state[j];
    result.count = count;
    return result;
  }
  __device__ __forceinline__ Part<Op> part(int j) const {
    Part<Op> result;
    result.state = state[j];
    result.count = count;
    return result;
  }
};

template <class Op, int kVec>
struct SharedColumns {
  typename Op::State state[kVec][kReductionThreads];
  typename Op::Compute count[Op::kCounts ? kReductionThreads : 1];
};

// The topmost threads get the parts of all threads below them, merged in a fixed tree.
template <class Op, int kVec>
__device__ __forceinline__ void merge_down(ColumnParts<Op, kVec>& parts,
                                           SharedColumns<Op, kVec>& shared, int log_across) {
  for (int half = (kReductionThreads >> log_across) / 2; half > 0; half /= 2) {
    const int limit = half << log_across;
    if (static_cast<int>(threadIdx.x) >= limit && static_cast<int>(threadIdx.x) < 2 * limit) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared.state[j][threadIdx.x] = parts.state[j];
      if constexpr (Op::kCounts) shared.count[threadIdx.x] = parts.count;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < limit) {
      const int below = threadIdx.x + limit;
      typename Op::Compute count = 0;
      if constexpr (Op::kCounts) count = shared.count[below];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        parts.state[j] = Op::merge(parts.state[j], parts.count, shared.state[j][below], count);
      }
      if constexpr (Op::kCounts) parts.count += count;
    }
  }
}

// Adds rows `begin` + `step`, and so on in steps of `down`, before `end`.
template <bool kTable, int kVec, class T, class Op>
__device__ __forceinline__ void walk_columns(const ReductionOperands<T, Op>& o, const T* source,
                                             int64_t begin, int64_t end, int down,
                                             ColumnParts<Op, kVec>& parts) {
  constexpr int kLoads = kColumnLoads<T, Op>;
  auto address = [&](int64_t row) {
    if constexpr (kTable) {
      return source + o.reduced.locate(row).input;
    } else {
      return source + row * o.reduced.stride[0];
    }
  };
  int64_t row = begin;
  for (; row + (kLoads - 1) * down < end; row += kLoads * down) {
    Vec<T, kVec> x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = load_once<kVec>(address(row + i * down));
    parts.template absorb<kLoads>(
        [&](int i, int j) { return convert<typename Op::Compute>(x[i][j]); });
  }
  Vec<T, kVec> x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (row + i * down < end) x[i] = load_once<kVec>(address(row + i * down));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (row + i * down >= end) break;
    const auto values = widen(x[i]);
    parts.template absorb<1>([&](int, int j) { return values[j]; });
  }
}

// Layout: any strides; the innermost axis of o.inner_size elements is kept.
// Grid: block b owns vectors of columns (b / splits) << log_lanes and so on, and of their rows
// split b % splits. The last block of a tile of columns to finish merges its parts.
template <class T, class Op, int kVec, bool kTable>
__global__ void __launch_bounds__(kReductionThreads, kBlocksPerSm<T>)
    reduce_columns_kernel(const __grid_constant__ ReductionOperands<T, Op> o) {
  using Merging = typename Op::Merging;
  __shared__ SharedColumns<Merging, kVec> shared;
  const int across = 1 << o.log_lanes, down = kReductionThreads >> o.log_lanes;
  const int column = threadIdx.x & (across - 1), step = threadIdx.x >> o.log_lanes;
  const int64_t tile = blockIdx.x / o.splits, split = blockIdx.x - tile * o.splits;
  const int64_t vector = (tile << o.log_lanes) + column;
  const int64_t per_outer = o.inner_size / kVec, outer = vector / per_outer;
  const int64_t inner = (vector - outer * per_outer) * kVec;
  const bool is_inside = vector < o.vectors;
  const auto place = o.kept.locate(is_inside ? outer : 0);

  ColumnParts<Op, kVec> walked;
  const int64_t begin = split * o.chunk;
  if (is_inside) {
    walk_columns<kTable>(o, o.input + place.input + inner * o.inner_stride, begin + step,
                         min(begin + o.chunk, o.steps), down, walked);
  }
  auto parts = walked.for_merging();
  merge_down(parts, shared, o.log_lanes);

  if (o.splits > 1) {
    using Stored = StoredPart<Merging>;
    auto index = [&](int64_t s, int j) {
      return ((tile * o.splits + s) * kVec + j) * across + column;
    };
    if (step == 0) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) Stored::store(o.parts, index(split, j), parts.part(j));
    }
    if (!is_last_block(o.tickets + tile, o.splits)) return;
    parts = ColumnParts<Merging, kVec>();
#pragma unroll 2
    for (int64_t s = step; s < o.splits; s += down) {
      typename Op::Compute count = 0;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Part<Merging> other = Stored::load(o.parts, index(s, j));
        parts.state[j] = Merging::merge(parts.state[j], parts.count, other.state, other.count);
        count = other.count;
      }
      if constexpr (Op::kCounts) parts.count += count;
    }
    merge_down(parts, shared, o.log_lanes);
  }
  if (step == 0 && is_inside) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      o.write(place.output + (inner + j) * o.inner_output_stride, parts.part(j));
    }
  }
}

}  // namespace warpwright
