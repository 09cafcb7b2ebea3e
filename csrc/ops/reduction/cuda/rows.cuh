// Reductions whose innermost axis is reduced. A row is all elements of one output: one run of
// adjacent elements, or several.
#pragma once

#include "ops/reduction/cuda/operands.cuh"

namespace warpwright {

// The run of adjacent elements from `data` on. Vectors are numbered from the 16-byte boundary up to
// `data`, which lies `phase` elements before it.
template <class T, int kVec>
struct Run {
  const T* data;
  int64_t size;
  int phase;

  __device__ Run(const T* first, int64_t count, bool is_whole_vectors)
      : data(first), size(count), phase(0) {
    if (kVec > 1 && !is_whole_vectors) {
      phase = static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVecBytes / sizeof(T));
    }
  }
  __device__ const T* vector(int64_t index) const { return data - phase + index * kVec; }
  // The vectors whose elements all belong to the run.
  __device__ int64_t whole_begin() const { return phase > 0 ? 1 : 0; }
  __device__ int64_t whole_end() const { return (phase + size) / kVec; }
  __device__ bool has(int64_t vector, int element) const {
    const int64_t place = vector * kVec + element - phase;
    return place >= 0 && place < size;
  }
};

// Adds all elements of `x`, 16 at a time: the wider values of more would not fit into registers.
template <class Op, class T, int kVec, int kLoads>
__device__ __forceinline__ void absorb_all(Part<Op>& part, const Vec<T, kVec> (&x)[kLoads]) {
  constexpr int kTogether = kVec >= 16 ? 1 : (16 / kVec < kLoads ? 16 / kVec : kLoads);
#pragma unroll
  for (int i = 0; i < kLoads; i += kTogether) {
    Vec<typename Op::Compute, kVec> values[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) values[k] = widen(x[i + k]);
    part.template absorb<kTogether * kVec>([&](int j) { return values[j / kVec][j % kVec]; });
  }
}
template <class Op, class T, int kVec>
__device__ __forceinline__ void absorb_vector(Part<Op>& part, const Vec<T, kVec>& x) {
  const auto values = widen(x);
  part.template absorb<kVec>([&](int j) { return values[j]; });
}

// Lane 0 of each group of `lanes` gets the parts of the group, merged in a fixed tree.
template <class Op>
__device__ __forceinline__ void merge_lanes(Part<Op>& part, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    part.merge(part.from_lane_below(distance));
  }
}

// Thread 0 gets the parts of the block. `shared` has one Part per warp.
template <class Op>
__device__ __forceinline__ void merge_block(Part<Op>& part, Part<Op>* shared) {
  constexpr int kWarps = kReductionThreads / kWarpSize;
  merge_lanes(part, kWarpSize);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = part;
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    part = threadIdx.x < kWarps ? shared[threadIdx.x] : Part<Op>();
    merge_lanes(part, kWarps);
  }
}

// Adds the elements of a run's first and last vector, if those are partly outside of the run and
// among the caller's vectors `begin` to `end`. Each lane takes one element.
template <class Op, int kVec, class T>
__device__ __forceinline__ void absorb_edges(Part<Op>& part, const Run<T, kVec>& run, int64_t begin,
                                             int64_t end, int lane) {
  const bool is_last = lane >= kVec;
  const int64_t vector = is_last ? run.whole_end() : 0;
  const int element = is_last ? lane - kVec : lane;
  const bool is_partial = is_last ? vector >= run.whole_begin() : run.whole_begin() > 0;
  if (lane < 2 * kVec && is_partial && vector >= begin && vector < end &&
      run.has(vector, element)) {
    const auto value = convert<typename Op::Compute>(run.vector(vector)[element]);
    part.template absorb<1>([&](int) { return value; });
  }
}

// Adds the vectors `begin` to `end`, all of whole elements. address(i) is that of vector i.
template <class Op, int kVec, int kLanes, class T, class Address>
__device__ __forceinline__ void absorb_vectors(Part<Op>& part, int64_t begin, int64_t end, int lane,
                                               const Address& address) {
  constexpr int kLoads = kRowLoads<T>;
  int64_t at = begin + lane;
  for (; at + (kLoads - 1) * kLanes < end; at += kLoads * kLanes) {
    Vec<T, kVec> x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = load_once<kVec>(address(at + i * kLanes));
    absorb_all(part, x);
  }
  Vec<T, kVec> x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (at + i * kLanes < end) x[i] = load_once<kVec>(address(at + i * kLanes));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (at + i * kLanes < end) absorb_vector(part, x[i]);
  }
}

// Walks the vectors `begin` to `end` of a row with kLanes threads. `lane`: this thread.
template <class Op, int kVec, int kLanes, bool kRuns, class T>
__device__ __forceinline__ Part<Op> walk_row(const ReductionOperands<T, Op>& o, const T* row,
                                             int64_t begin, int64_t end, int lane) {
  Part<Op> part;
  if constexpr (kRuns) {  // of whole vectors
    absorb_vectors<Op, kVec, kLanes, T>(part, begin, end, lane, [&](int64_t at) {
      int run, vector;
      o.by_vectors.divmod(static_cast<int>(at), run, vector);
      return row + o.reduced.locate(run).input + vector * (kVec == 1 ? o.inner_stride : kVec);
    });
  } else {
    const Run<T, kVec> run(row, o.inner_size, o.is_whole_vectors);
    if (kVec > 1 && !o.is_whole_vectors) absorb_edges<Op, kVec>(part, run, begin, end, lane);
    const int64_t first = max(begin, run.whole_begin()), last = min(end, run.whole_end());
    absorb_vectors<Op, kVec, kLanes, T>(part, first, last, lane, [&](int64_t at) {
      return kVec == 1 ? row + at * o.inner_stride : run.vector(at);
    });
  }
  return part;
}

// Layout: any strides; the innermost axis of o.inner_size elements is reduced.
// Grid: block b owns 8 * (256 >> log_lanes) rows of up to 1 << log_lanes vectors. Each of a warp's
// groups of lanes loads 8 rows at once, one vector per lane.
template <class T, class Op, int kVec>
__global__ void __launch_bounds__(kReductionThreads, kBlocksPerSm<T>)
    reduce_groups_kernel(const __grid_constant__ ReductionOperands<T, Op> o) {
  const int lanes = 1 << o.log_lanes;
  const int groups = kReductionThreads >> o.log_lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t first =
      int64_t{blockIdx.x} * groups * kReductionLoads + (threadIdx.x >> o.log_lanes);
  auto run_of = [&](int64_t row) {
    return Run<T, kVec>(o.input + o.kept.locate(row).input, o.inner_size, o.is_whole_vectors);
  };
  Vec<T, kVec> x[kReductionLoads];
#pragma unroll
  for (int i = 0; i < kReductionLoads; ++i) {
    const int64_t row = first + i * groups;
    if (row >= o.outputs || lane >= o.vectors) continue;
    const Run<T, kVec> run = run_of(row);
    if constexpr (kVec == 1) {
      x[i][0] = run.data[lane * o.inner_stride];
    } else if (run.vector(lane) + kVec <= o.end) {  // also reads what lies next to the run
      x[i] = load_once<kVec>(run.vector(lane));
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (run.has(lane, j)) x[i][j] = run.vector(lane)[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kReductionLoads; ++i) {
    const int64_t row = first + i * groups;
    Part<Op> part;
    if (row < o.outputs && lane < o.vectors) {
      if (kVec == 1 || o.is_whole_vectors) {
        absorb_vector(part, x[i]);
      } else {
        const Run<T, kVec> run = run_of(row);
        const auto values = widen(x[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (run.has(lane, j)) part.template absorb<1>([&](int) { return values[j]; });
        }
      }
    }
    merge_lanes(part, lanes);
    if (lane == 0 && row < o.outputs) o.write(o.kept.locate(row).output, part);
  }
}

// Grid: warp w of block b owns row 8 b + w.
template <class T, class Op, int kVec, bool kRuns>
__global__ void __launch_bounds__(kReductionThreads, kBlocksPerSm<T>)
    reduce_warps_kernel(const __grid_constant__ ReductionOperands<T, Op> o) {
  constexpr int kWarps = kReductionThreads / kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (row >= o.outputs) return;
  const auto place = o.kept.locate(row);
  const int lane = threadIdx.x % kWarpSize;
  auto part = walk_row<Op, kVec, kWarpSize, kRuns>(o, o.input + place.input, 0, o.steps, lane)
                  .for_merging();
  merge_lanes(part, kWarpSize);
  if (lane == 0) o.write(place.output, part);
}

// Grid: block b owns split b % splits of row b / splits. The last block of a row to finish merges
// its parts.
template <class T, class Op, int kVec, bool kRuns>
__global__ void __launch_bounds__(kReductionThreads, kBlocksPerSm<T>)
    reduce_blocks_kernel(const __grid_constant__ ReductionOperands<T, Op> o) {
  using Merging = typename Op::Merging;
  __shared__ Part<Merging> shared[kReductionThreads / kWarpSize];
  const int64_t row = blockIdx.x / o.splits, split = blockIdx.x - row * o.splits;
  const auto place = o.kept.locate(row);
  const int64_t begin = split * o.chunk;
  auto part = walk_row<Op, kVec, kReductionThreads, kRuns>(
                  o, o.input + place.input, begin, min(begin + o.chunk, o.steps), threadIdx.x)
                  .for_merging();
  merge_block(part, shared);
  if (o.splits > 1) {
    using Stored = StoredPart<Merging>;
    if (threadIdx.x == 0) Stored::store(o.parts, blockIdx.x, part);
    if (!is_last_block(o.tickets + row, o.splits)) return;
    part = Part<Merging>();
    for (int64_t s = threadIdx.x; s < o.splits; s += kReductionThreads) {
      part.merge(Stored::load(o.parts, row * o.splits + s));
    }
    merge_block(part, shared);
  }
  if (threadIdx.x == 0) o.write(place.output, part);
}

}  // namespace warpwright
