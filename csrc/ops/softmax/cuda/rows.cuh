// The dimension is contiguous: a group of threads per row (tile/rows/).
//
// Forward: each warp computes the exponentials relative to its own maximum and keeps them in
// registers. The warps exchange maximum and sum once per row. A thread then multiplies its
// exponentials by exp(own maximum - the row's) / sum: one exponential per element, and at most one
// barrier per row.
#pragma once

#include "host/launch.h"
#include "ops/softmax/cuda/math.cuh"
#include "tile/rows/ring.cuh"

namespace warpwright {

template <class Acc>
__device__ __forceinline__ Acc largest_of_lanes(Acc value, int width) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < width) value = larger(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// Writes the softmax of a row that its group holds. All threads of the group call.
template <class O, bool kLog, class T, int kVec, int kHeld>
__device__ __forceinline__ void write_softmax(const Vec<T, kVec> (&x)[kHeld],
                                              const HeldColumns<kVec>& columns,
                                              const RowGroup& group,
                                              RowMeeting<Accum<O>, 2>& meeting, bool present,
                                              O* y) {
  using Acc = Accum<O>;
  const int width = group.lanes < kWarpSize ? group.lanes : kWarpSize;
  Acc own = lowest<Acc>();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const Vec<Acc, kVec> values = widen(x[i]);
    Acc part = values[0];
#pragma unroll
    for (int j = 1; j < kVec; ++j) part = larger(part, values[j]);
    own = columns.has(i) ? larger(own, part) : own;
  }
  own = largest_of_lanes(own, width);
  const Acc reference = reference_of(own);
  Vec<Acc, kVec> e[kHeld];
  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    e[i] = widen(x[i]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) e[i][j] = exp_for<O>(e[i][j] - reference);
    const Acc part = tree_sum<kVec>([&](int j) { return e[i][j]; });
    sum += columns.has(i) ? part : Acc(0);
  }
  sum = sum_of_lanes(sum, width);
  Acc maximum = own;
  if (group.warps() > 1) {
    Acc brought[2] = {own, sum};
    meeting.exchange(brought);
    if (meeting.stands_for() >= group.warps()) brought[0] = lowest<Acc>();
    maximum = largest_of_lanes(brought[0], meeting.width());
    sum = sum_of_lanes(brought[1] * exp_for<O>(brought[0] - maximum), meeting.width());
  }
  if (!present) return;
  Acc scale = softmax_scale<kLog>(sum);
  if constexpr (!kLog) {
    if (group.warps() > 1) scale *= exp_for<O>(own - maximum);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!columns.has(i)) continue;
    Vec<Acc, kVec> result = kLog ? widen(x[i]) : e[i];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result[j] = kLog ? result[j] - maximum - scale : result[j] * scale;
    }
    store_converted(y + columns.first(i), result);
  }
}

// Layout: x, y (rows, length). Grid: persistent blocks. Group g of block b has the rows
// b * groups + g, + gridDim * groups, and so on.
template <class T, class O, int kHeld, bool kLog>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_persistent_kernel(const SoftmaxParams p, int lanes) {
  using Acc = Accum<O>;
  constexpr int kVec = kVecSize<T>;
  using Ring = RowRing<kHeld, T>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[RowMeeting<Acc, 2>::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.length));
  RowMeeting<Acc, 2> meeting(group, meeting_storage);
  Ring ring(ring_storage, columns);
  const int64_t step = int64_t{gridDim.x} * group.count;
  int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  auto operand = [&](int64_t r) {
    return std::tuple(static_cast<const T*>(p.input) + r * p.length);
  };
#pragma unroll 1
  for (int stage = 0; stage < Ring::kStages; ++stage) {
    const int64_t r = row + stage * step;
    ring.copy(stage, operand(r), r < p.outer);
  }
  // All groups of a block take the same number of turns.
  for (; p.outer > row - group.index; row += step) {
    ring.wait();
    Vec<T, kVec> x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[i] = ring.template read<0>(i);
    const int64_t later = row + Ring::kStages * step;
    ring.replace(operand(later), later < p.outer);
    write_softmax<O, kLog>(x, columns, group, meeting, row < p.outer,
                           static_cast<O*>(p.output) + row * p.length);
  }
}

// Layout: as above. Grid: a block has blockDim / lanes rows. One element per access.
template <class T, class O, bool kLog>
__global__ void __launch_bounds__(kSoftmaxHeldThreads)
    softmax_held_kernel(const SoftmaxParams p, int lanes) {
  using Acc = Accum<O>;
  __shared__ Acc meeting_storage[RowMeeting<Acc, 2>::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<1> columns(group, static_cast<int>(p.length));
  RowMeeting<Acc, 2> meeting(group, meeting_storage);
  const int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  Vec<T, 1> x[kSoftmaxElements];
  load_held(static_cast<const T*>(p.input) + row * p.length, columns, row < p.outer, x);
  write_softmax<O, kLog>(x, columns, group, meeting, row < p.outer,
                         static_cast<O*>(p.output) + row * p.length);
}

// Layout: as above. Grid: one block per row. kStaged: each thread copies its own vectors to shared
// memory and reads them there. Otherwise the second read usually comes from L1 or L2.
template <class T, class O, int kVec, bool kLog, bool kStaged>
__global__ void __launch_bounds__(kStaged ? kSoftmaxStagedThreads : kSoftmaxThreads)
    softmax_looped_kernel(const SoftmaxParams p) {
  using Acc = Accum<O>;
  extern __shared__ uint4 row_storage[];
  __shared__ Acc shared[kMaxRowWarps];
  const T* x = static_cast<const T*>(p.input) + int64_t{blockIdx.x} * p.length;
  O* y = static_cast<O*>(p.output) + int64_t{blockIdx.x} * p.length;
  const T* vectors = x;  // where the row's vectors are read
  if constexpr (kStaged) {
    const int head = row_head<kVec>(x);
    const int count = static_cast<int>(p.length - head) / kVec;
    for (int v = static_cast<int>(threadIdx.x); v < count; v += static_cast<int>(blockDim.x))
      cp_async<16>(smem_address(row_storage + v), x + head + v * kVec);
    cp_async_commit();
    cp_async_wait<0>();
    vectors = reinterpret_cast<const T*>(row_storage) - head;
  }
  OnlineSum<O> own;
  for_row_vectors<kVec>(x, p.length, [&]<int kSize, int kCount>(int64_t column, int64_t step) {
    const VectorBatch<kSize, kCount, T> batch((kSize > 1 ? vectors : x) + column, step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) own.add(widen(batch.of[i]));
  });
  const Acc maximum =
      block_reduce(own.maximum, [](Acc a, Acc b) { return larger(a, b); }, lowest<Acc>(), shared);
  // A thread without finite values brings 0, but a row without any brings NaN.
  const Acc sum = block_reduce(own.sum * exp_for<O>(own.maximum - maximum), Sum{}, Acc(0), shared);
  const Acc scale = softmax_scale<kLog>(sum);
  for_row_vectors<kVec>(x, p.length, [&]<int kSize, int kCount>(int64_t column, int64_t step) {
    const VectorBatch<kSize, kCount, T> batch((kSize > 1 ? vectors : x) + column, step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Vec<Acc, kSize> values = widen(batch.of[i]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = softmax_of<O, kLog>(values[j], maximum, scale);
      store_converted(y + column + i * step, values);
    }
  });
}

// ---- backward ----

// Layout: y, dy, dx (rows, length). Grid: as softmax_persistent_kernel.
template <class T, class O, int kHeld, bool kLog>
__global__ void __launch_bounds__(kSoftmaxThreads, 1)
    softmax_bwd_persistent_kernel(const SoftmaxBackwardParams p, int lanes) {
  using Acc = Accum<O>;
  constexpr int kVec = kVecSize<O>;
  using Ring = RowRing<kHeld, O, O>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[RowMeeting<Acc, 1>::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.length));
  RowMeeting<Acc, 1> meeting(group, meeting_storage);
  Ring ring(ring_storage, columns);
  const int64_t step = int64_t{gridDim.x} * group.count;
  int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  auto operands = [&](int64_t r) {
    return std::tuple(static_cast<const O*>(p.output) + r * p.length,
                      static_cast<const O*>(p.grad_output) + r * p.length);
  };
#pragma unroll 1
  for (int stage = 0; stage < Ring::kStages; ++stage) {
    const int64_t r = row + stage * step;
    ring.copy(stage, operands(r), r < p.outer);
  }
  for (; p.outer > row - group.index; row += step) {
    ring.wait();
    Vec<O, kVec> y[kHeld], dy[kHeld];
    Acc sum[1] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      y[i] = ring.template read<0>(i);
      dy[i] = ring.template read<1>(i);
      const Vec<Acc, kVec> wide_y = widen(y[i]), wide_dy = widen(dy[i]);
      sum[0] += tree_sum<kVec>([&](int j) { return softmax_term<kLog>(wide_y[j], wide_dy[j]); });
    }
    const int64_t later = row + Ring::kStages * step;
    ring.replace(operands(later), later < p.outer);
    meeting.sum(sum);
    if (row >= p.outer) continue;
    T* dx = static_cast<T*>(p.grad_input) + row * p.length;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!columns.has(i)) continue;
      const Vec<Acc, kVec> wide_y = widen(y[i]), wide_dy = widen(dy[i]);
      Vec<Acc, kVec> result;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        result[j] = softmax_gradient<O, kLog>(wide_y[j], wide_dy[j], sum[0]);
      }
      store_converted(dx + columns.first(i), result);
    }
  }
}

template <class T, class O, bool kLog>
__global__ void __launch_bounds__(kSoftmaxHeldThreads)
    softmax_bwd_held_kernel(const SoftmaxBackwardParams p, int lanes) {
  using Acc = Accum<O>;
  __shared__ Acc meeting_storage[RowMeeting<Acc, 1>::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<1> columns(group, static_cast<int>(p.length));
  RowMeeting<Acc, 1> meeting(group, meeting_storage);
  const int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  const bool present = row < p.outer;
  Vec<O, 1> y[kSoftmaxElements], dy[kSoftmaxElements];
  load_held(static_cast<const O*>(p.output) + row * p.length, columns, present, y);
  load_held(static_cast<const O*>(p.grad_output) + row * p.length, columns, present, dy);
  Acc sum[1] = {};
#pragma unroll
  for (int i = 0; i < kSoftmaxElements; ++i) {
    sum[0] += softmax_term<kLog>(convert<Acc>(y[i][0]), convert<Acc>(dy[i][0]));
  }
  meeting.sum(sum);
  if (!present) return;
  T* dx = static_cast<T*>(p.grad_input) + row * p.length;
#pragma unroll
  for (int i = 0; i < kSoftmaxElements; ++i) {
    if (!columns.has(i)) continue;
    dx[columns.first(i)] = convert<T>(
        softmax_gradient<O, kLog>(convert<Acc>(y[i][0]), convert<Acc>(dy[i][0]), sum[0]));
  }
}

template <class T, class O, int kVec, bool kLog>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_bwd_looped_kernel(const SoftmaxBackwardParams p) {
  using Acc = Accum<O>;
  __shared__ Acc shared[kMaxRowWarps];
  const int64_t begin = int64_t{blockIdx.x} * p.length;
  const O *y = static_cast<const O*>(p.output) + begin,
          *dy = static_cast<const O*>(p.grad_output) + begin;
  T* dx = static_cast<T*>(p.grad_input) + begin;
  Acc own = 0;
  for_row_vectors<kVec>(dy, p.length, [&]<int kSize, int kCount>(int64_t column, int64_t step) {
    const VectorBatch<kSize, kCount, O> dys(dy + column, step), ys((kLog ? dy : y) + column, step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Vec<Acc, kSize> grads = widen(dys.of[i]), values = widen(ys.of[i]);
      own += tree_sum<kSize>([&](int j) { return softmax_term<kLog>(values[j], grads[j]); });
    }
  });
  const Acc sum = block_reduce(own, Sum{}, Acc(0), shared);
  for_row_vectors<kVec>(dy, p.length, [&]<int kSize, int kCount>(int64_t column, int64_t step) {
    const VectorBatch<kSize, kCount, O> dys(dy + column, step), ys(y + column, step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Vec<Acc, kSize> grads = widen(dys.of[i]), values = widen(ys.of[i]);
      Vec<Acc, kSize> result;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        result[j] = softmax_gradient<O, kLog>(values[j], grads[j], sum);
      }
      store_converted(dx + column + i * step, result);
    }
  });
}

}  // namespace warpwright
