// The dimension is not contiguous: a block has some vectors of neighbouring columns across, and its
// threads share each column's elements. Threads merge maxima and sums by shuffles within a warp and
// through shared memory between warps.
#pragma once

#include "host/launch.h"
#include "ops/softmax/cuda/math.cuh"

namespace warpwright {

// This thread's place: a vector of columns, and the elements down + i * threads_down of each.
template <int kVec>
struct SoftmaxColumns {
  int across, down, threads_down;
  bool present;
  int64_t begin, pitch, length;  // of the thread's first element, and between elements

  __device__ __forceinline__ SoftmaxColumns(const SoftmaxShape& p, int across_)
      : across(static_cast<int>(threadIdx.x) % across_),
        down(static_cast<int>(threadIdx.x) / across_),
        threads_down(static_cast<int>(blockDim.x) / across_),
        pitch(p.inner),
        length(p.length) {
    const int64_t per_slab = p.inner / kVec;
    const int64_t vector = int64_t{blockIdx.x} * across_ + across;
    const int64_t slab = vector / per_slab;
    present = slab < p.outer;
    begin = slab * p.length * p.inner + (vector - slab * per_slab) * kVec + down * p.inner;
  }
  __device__ __forceinline__ bool has(int64_t i) const {
    return present && down + i * threads_down < length;
  }
  __device__ __forceinline__ int64_t offset(int64_t i) const {
    return begin + i * threads_down * pitch;
  }
};

// A number per column, reduced over the threads that share it. Layout of `shared`: (slices, across
// * kVec), where a slice is a warp, or a row of threads if that is wider.
template <int kVec, class Acc>
class ColumnReduction {
 public:
  __device__ __forceinline__ ColumnReduction(int across, Acc* shared)
      : across_(across), width_(across * kVec), shared_(shared) {
    const int lanes = across < kWarpSize ? kWarpSize : across;
    slices_ = static_cast<int>(blockDim.x) / lanes;
    slice_ = static_cast<int>(threadIdx.x) / lanes;
    column_ = static_cast<int>(threadIdx.x) % across * kVec;
  }

  template <class Op>
  __device__ __forceinline__ void reduce(Acc (&values)[kVec], Op op) {
    for (int offset = across_; offset < kWarpSize; offset *= 2) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        values[j] = op(values[j], __shfl_xor_sync(kFullMask, values[j], offset));
      }
    }
    if (slices_ == 1) return;
    __syncthreads();
    if (across_ >= kWarpSize || static_cast<int>(threadIdx.x) % kWarpSize < across_) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared_[slice_ * width_ + column_ + j] = values[j];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < width_; c += blockDim.x) {
      Acc total = shared_[c];
      for (int s = 1; s < slices_; ++s) total = op(total, shared_[s * width_ + c]);
      shared_[c] = total;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[j] = shared_[column_ + j];
  }

 private:
  int across_, width_, slices_, slice_, column_;
  Acc* shared_;
};

// Bytes of shared memory of a block of `threads`.
template <int kVec, class Acc>
constexpr int64_t column_reduction_bytes(int threads) {
  return int64_t{threads} * kVec * static_cast<int64_t>(sizeof(Acc));
}

// Calls f(i, offset) for this thread's elements: kHeld of them, or all if kHeld is 0.
template <int kHeld, int kVec, class F>
__device__ __forceinline__ void for_column_rows(const SoftmaxColumns<kVec>& columns, F&& f) {
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (columns.has(i)) f(i, columns.offset(i));
    }
  } else {
#pragma unroll 4
    for (int64_t i = 0; columns.has(i); ++i) f(0, columns.offset(i));
  }
}

// Layout: x, y (outer, length, inner). Grid: `across` vectors of columns per block. kHeld: rows per
// thread in registers; 0: rows are read twice.
template <class T, class O, int kVec, int kHeld, bool kLog>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_columns_kernel(const SoftmaxParams p, int across) {
  using Acc = Accum<O>;
  extern __shared__ uint4 shared[];
  const SoftmaxColumns<kVec> columns(p, across);
  ColumnReduction<kVec, Acc> reduction(across, reinterpret_cast<Acc*>(shared));
  const T* input = static_cast<const T*>(p.input);
  Vec<T, kVec> held[kHeld > 0 ? kHeld : 1];
  Acc own[kVec], maximum[kVec], sum[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    own[j] = lowest<Acc>();
    sum[j] = 0;
  }
  if constexpr (kHeld > 0) {
    for_column_rows<kHeld>(columns,
                           [&](int i, int64_t at) { held[i] = load_vec<kVec>(input + at); });
    for_column_rows<kHeld>(columns, [&](int i, int64_t) {
      const Vec<Acc, kVec> values = widen(held[i]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) own[j] = larger(own[j], values[j]);
    });
  } else {
    for_column_rows<0>(columns, [&](int, int64_t at) {
      const Vec<Acc, kVec> values = widen(load_vec<kVec>(input + at));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Acc next = larger(own[j], values[j]), reference = reference_of(next);
        sum[j] = sum[j] * exp_for<O>(own[j] - reference) + exp_for<O>(values[j] - reference);
        own[j] = next;
      }
    });
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) maximum[j] = own[j];
  reduction.reduce(maximum, [](Acc a, Acc b) { return larger(a, b); });
  if constexpr (kHeld > 0) {
    for_column_rows<kHeld>(columns, [&](int i, int64_t) {
      const Vec<Acc, kVec> values = widen(held[i]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += exp_for<O>(values[j] - maximum[j]);
    });
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] *= exp_for<O>(own[j] - maximum[j]);
  }
  reduction.reduce(sum, Sum{});
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum[j] = softmax_scale<kLog>(sum[j]);
  O* output = static_cast<O*>(p.output);
  for_column_rows<kHeld>(columns, [&](int i, int64_t at) {
    Vec<Acc, kVec> values;
    if constexpr (kHeld > 0) {
      values = widen(held[i]);
    } else {
      values = widen(load_vec<kVec>(input + at));
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[j] = softmax_of<O, kLog>(values[j], maximum[j], sum[j]);
    store_converted(output + at, values);
  });
}

// Layout: y, dy, dx (outer, length, inner). Grid and kHeld: as above.
template <class T, class O, int kVec, int kHeld, bool kLog>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_bwd_columns_kernel(const SoftmaxBackwardParams p, int across) {
  using Acc = Accum<O>;
  extern __shared__ uint4 shared[];
  const SoftmaxColumns<kVec> columns(p, across);
  ColumnReduction<kVec, Acc> reduction(across, reinterpret_cast<Acc*>(shared));
  const O *output = static_cast<const O*>(p.output), *grad = static_cast<const O*>(p.grad_output);
  constexpr int kRows = kHeld > 0 ? kHeld : 1;
  Vec<O, kVec> y[kRows], dy[kRows];
  auto load = [&](int i, int64_t at) {
    y[i] = load_vec<kVec>(output + at);
    dy[i] = load_vec<kVec>(grad + at);
  };
  Acc sum[kVec] = {};
  if constexpr (kHeld > 0) for_column_rows<kHeld>(columns, load);
  for_column_rows<kHeld>(columns, [&](int i, int64_t at) {
    if constexpr (kHeld == 0) load(i, at);
    const Vec<Acc, kVec> wide_y = widen(y[i]), wide_dy = widen(dy[i]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] += softmax_term<kLog>(wide_y[j], wide_dy[j]);
  });
  reduction.reduce(sum, Sum{});
  T* grad_input = static_cast<T*>(p.grad_input);
  for_column_rows<kHeld>(columns, [&](int i, int64_t at) {
    if constexpr (kHeld == 0) load(i, at);
    const Vec<Acc, kVec> wide_y = widen(y[i]), wide_dy = widen(dy[i]);
    Vec<Acc, kVec> result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result[j] = softmax_gradient<O, kLog>(wide_y[j], wide_dy[j], sum[j]);
    }
    store_converted(grad_input + at, result);
  });
}

}  // namespace warpwright
