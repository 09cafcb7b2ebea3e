// Forward: a group of threads holds its row, or a block reads its row three times.
#include "host/launch.h"
#include "ops/layer_norm/layer_norm.h"
#include "tile/rows/moments.cuh"

namespace warpwright {
namespace {

template <class Acc>
__device__ __forceinline__ Acc reciprocal_root(Acc value) {
  if constexpr (sizeof(Acc) == 8) {
    return rsqrt(value);
  } else {
    return rsqrtf(value);
  }
}

// One thread per row saves its statistics.
template <class Acc>
__device__ __forceinline__ void save_statistics(const LayerNormParams& p, int64_t row, Acc mean,
                                                Acc rstd) {
  if (p.mean != nullptr) static_cast<Acc*>(p.mean)[row] = mean;
  static_cast<Acc*>(p.rstd)[row] = rstd;
}

template <class T, int kVec>
__device__ __forceinline__ Vec<T, kVec> normalize(const LayerNormParams& p,
                                                  const Vec<T, kVec>& input, Accum<T> mean,
                                                  Accum<T> rstd, int64_t column) {
  using Acc = Accum<T>;
  Vec<Acc, kVec> y = widen(input);
#pragma unroll
  for (int j = 0; j < kVec; ++j) y[j] = (y[j] - mean) * rstd;
  if (p.weight.data != nullptr) {
    const auto weight =
        load_either<T, kVec>(p.weight.data, p.weight.dtype == DType::kFloat32, column);
#pragma unroll
    for (int j = 0; j < kVec; ++j) y[j] *= weight[j];
  }
  if (p.bias.data != nullptr) {
    const auto bias = load_either<T, kVec>(p.bias.data, p.bias.dtype == DType::kFloat32, column);
#pragma unroll
    for (int j = 0; j < kVec; ++j) y[j] += bias[j];
  }
  return narrow<T>(y);
}

// Layout: x (rows, cols), row stride p.input_stride; y dense. Grid: a block has blockDim / lanes
// rows. A thread holds kHeld vectors of its row.
template <class T, int kVec, int kHeld, bool kCentered>
__global__ void __launch_bounds__(kNormMaxThreads)
    layer_norm_held_kernel(const LayerNormParams p, int lanes) {
  using Acc = Accum<T>;
  using Meeting = MomentsMeeting<kCentered, Acc>;
  __shared__ Acc storage[Meeting::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.cols));
  Meeting meeting(group, storage);
  const int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  const bool present = row < p.rows;

  Vec<T, kVec> x[kHeld];
  load_held(static_cast<const T*>(p.input) + row * p.input_stride, columns, present, x);
  const auto moments =
      row_moments<kCentered>(x, columns, static_cast<int>(p.cols), meeting);
  const Acc rstd = reciprocal_root(moments.squares / static_cast<Acc>(p.cols) +
                                   static_cast<Acc>(p.eps));
  if (!present) return;
  if (columns.lane == 0) save_statistics(p, row, moments.mean, rstd);
  T* y = static_cast<T*>(p.output) + row * p.cols;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!columns.has(i)) continue;
    const int column = columns.first(i);
    store_vec_global(y + column, normalize<T, kVec>(p, x[i], moments.mean, rstd, column));
  }
}

// Calls f(column, vector) for this thread's vectors of the block's row.
template <int kVec, class T, class F>
__device__ __forceinline__ void for_vectors(const T* row, int64_t cols, F&& f) {
  const int64_t step = int64_t{blockDim.x} * kVec;
#pragma unroll 4
  for (int64_t c = int64_t{threadIdx.x} * kVec; c < cols; c += step) f(c, load_vec<kVec>(row + c));
}

// Layout: as above. Grid: a block per row; the second and third read come from L2 as a rule.
template <class T, int kVec, bool kCentered>
__global__ void __launch_bounds__(kNormLoopThreads)
    layer_norm_looped_kernel(const LayerNormParams p) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kMaxRowWarps];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
  Acc mean = 0, squares = 0;
  if constexpr (kCentered) {
    for_vectors<kVec>(x, p.cols, [&](int64_t, const Vec<T, kVec>& v) {
      const Vec<Acc, kVec> values = widen(v);
      mean += tree_sum<kVec>([&](int j) { return values[j]; });
    });
    mean = block_reduce(mean, Sum{}, Acc(0), shared) / static_cast<Acc>(p.cols);
  }
  for_vectors<kVec>(x, p.cols, [&](int64_t, const Vec<T, kVec>& v) {
    const Vec<Acc, kVec> values = widen(v);
    squares += tree_sum<kVec>([&](int j) { return (values[j] - mean) * (values[j] - mean); });
  });
  squares = block_reduce(squares, Sum{}, Acc(0), shared);
  const Acc rstd =
      reciprocal_root(squares / static_cast<Acc>(p.cols) + static_cast<Acc>(p.eps));
  if (threadIdx.x == 0) save_statistics(p, row, mean, rstd);
  T* y = static_cast<T*>(p.output) + row * p.cols;
  for_vectors<kVec>(x, p.cols, [&](int64_t column, const Vec<T, kVec>& v) {
    store_vec(y + column, normalize<T, kVec>(p, v, mean, rstd, column));
  });
}

template <class T, int kVec, bool kCentered>
void launch_held(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  auto run = [&]<int kHeld>() {
    launch(layer_norm_held_kernel<T, kVec, kHeld, kCentered>,
           dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p, plan.lanes);
  };
  if constexpr (kVec == 1) {
    for_int<kNormElementVectors>(plan.vectors, run);
  } else {
    for_int<1, 2, 4, kNormMaxVectors>(plan.vectors, run);
  }
}

}  // namespace

void launch_layer_norm(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    for_bool(p.centered, [&]<bool kCentered>() {
      for_bool(plan.vec > 1, [&]<bool kVectorized>() {
        constexpr int kVec = kVectorized ? kVecSize<T> : 1;
        if (plan.held) return launch_held<T, kVec, kCentered>(p, plan, stream);
        launch(layer_norm_looped_kernel<T, kVec, kCentered>,
               dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p);
      });
    });
  });
}

}  // namespace warpwright
