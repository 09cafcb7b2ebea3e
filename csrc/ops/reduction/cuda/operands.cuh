// The operands of a reduction's kernels, and how blocks that share an output merge their parts.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/ticket.cuh"
#include "device/vec.cuh"
#include "ops/reduction/cuda/operators.cuh"
#include "ops/reduction/reduction.h"

namespace warpwright {

// Blocks per SM, and vectors that a thread loads at once: as many as registers hold without spills.
// That keeps 48 KB per SM in flight, twice the bytes that hide the latency of memory.
template <class T>
constexpr int kBlocksPerSm = sizeof(T) == 8 ? 2 : kReductionBlocksPerSm;
template <class T>
constexpr int kRowLoads = sizeof(T) == 8 ? 4 : kReductionLoads;
template <class T, class Op>
constexpr int kColumnLoads =
    sizeof(T) == 8 || (sizeof(T) == 2 && sizeof(typename Op::State) > 4) ? 4 : kReductionLoads;

// Evict-first: L2 drops these lines first, so it does not write back other kernels' dirty lines.
template <int kVec, class T>
__device__ __forceinline__ Vec<T, kVec> load_once(const T* source) {
  if constexpr (sizeof(Vec<T, kVec>) == kVecBytes) {
    return load_vec_streaming<kVec>(source);
  } else {
    return load_vec<kVec>(source);
  }
}

// Axes of one role, without the innermost one.
struct DeviceTable {
  int count;
  bool is_small;  // indices fit into 32 bits
  int64_t size[kReductionAxes], stride[kReductionAxes], output_stride[kReductionAxes];
  FastDivmod by_size[kReductionAxes];

  __host__ static DeviceTable from(const ReductionTable& table) {
    DeviceTable result{};
    result.count = table.count;
    result.is_small = table.total < (int64_t{1} << 31);
    for (int i = 0; i < table.count; ++i) {
      result.size[i] = table.axes[i].size;
      result.stride[i] = table.axes[i].stride;
      result.output_stride[i] = table.axes[i].output_stride;
      if (result.is_small) result.by_size[i] = FastDivmod(table.axes[i].size);
    }
    return result;
  }

  struct Place {
    int64_t input = 0, output = 0;
  };
  __device__ __forceinline__ Place locate(int64_t index) const {
    if (count <= 1) return {index * stride[0], index * output_stride[0]};
    Place place;
#pragma unroll
    for (int i = 0; i < kReductionAxes; ++i) {
      if (i >= count) break;
      int64_t along = index;
      if (i + 1 < count) {
        int64_t rest;
        if (is_small) {
          rest = by_size[i].quotient(static_cast<int>(index));
        } else {
          rest = index / size[i];
        }
        along = index - rest * size[i];
        index = rest;
      }
      place.input += along * stride[i];
      place.output += along * output_stride[i];
    }
    return place;
  }
};

template <class T, class Op>
struct ReductionOperands {
  const T* input;
  void* output;
  bool writes_compute;  // the output has the accumulator's type, not that of the input
  ReductionScale scale;
  DeviceTable kept, reduced;
  int64_t outputs;
  // Rows: of the reduced innermost axis. Columns: of the kept one.
  int64_t inner_size, inner_stride, inner_output_stride;
  const T* end;           // of the input's memory
  bool is_whole_vectors;  // rows
  int64_t vectors;        // rows: of a run. Columns: across
  FastDivmod by_vectors;  // rows of several runs
  int64_t steps;          // rows: vectors of all runs. Columns: reduced rows
  int64_t splits, chunk;  // steps per split
  int log_lanes;
  unsigned* tickets;  // per output or tile of columns, zeroed; with splits
  void* parts;

  template <class Part>
  __device__ __forceinline__ void write(int64_t index, const Part& part) const {
    const auto value = Part::Operator::result(part.state, scale);
    if (writes_compute) {
      static_cast<typename Op::Compute*>(output)[index] = static_cast<typename Op::Compute>(value);
    } else {
      static_cast<T*>(output)[index] = convert<T>(value);
    }
  }
};

// Whether this block is the last of `count` to arrive. What the others wrote before is then visible
// to all its threads. All threads call. The counter is back at 0 after the last one.
__device__ __forceinline__ bool is_last_block(unsigned* counter, int64_t count) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();             // of all threads' writes, which came before the barrier
    wait_for_previous_kernel();  // which zeroes the counters
    is_last = atomicInc(counter, static_cast<unsigned>(count - 1)) == count - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

}  // namespace warpwright
