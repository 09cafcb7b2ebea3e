// Forward: persistent groups of threads walk rows, a block holds its rows, or it reads a row three
// times.
#include "host/launch.h"
#include "ops/layer_norm/layer_norm.h"
#include "tile/rows/moments.cuh"
#include "tile/rows/ring.cuh"

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

// The factors and summands of kVec columns.
template <class T, int kVec>
struct Affine {
  using Acc = Accum<T>;
  Vec<Acc, kVec> weight, bias;

  // Absent columns get arbitrary values.
  __device__ __forceinline__ void load(const LayerNormParams& p, int64_t column, bool present) {
    if (present && p.weight.data != nullptr) {
      weight = load_either<T, kVec>(p.weight.data, p.weight.dtype == DType::kFloat32, column);
    } else {
      fill(weight, Acc(1));
    }
    if (present && p.bias.data != nullptr) {
      bias = load_either<T, kVec>(p.bias.data, p.bias.dtype == DType::kFloat32, column);
    } else {
      fill(bias, Acc(0));
    }
  }
  template <bool kCentered>
  __device__ __forceinline__ Vec<T, kVec> apply(const Vec<T, kVec>& input, Acc mean,
                                                Acc rstd) const {
    Vec<Acc, kVec> y = widen(input);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if constexpr (kCentered) {
        y[j] = (y[j] - mean) * rstd * weight[j] + bias[j];
      } else {
        y[j] = y[j] * rstd * weight[j];
      }
    }
    return narrow<T>(y);
  }

 private:
  static __device__ __forceinline__ void fill(Vec<Acc, kVec>& values, Acc value) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[j] = value;
  }
};

template <class Acc>
__device__ __forceinline__ Acc rstd_of(const LayerNormParams& p, Acc squares) {
  return reciprocal_root(squares / static_cast<Acc>(p.cols) + static_cast<Acc>(p.eps));
}

// Layout: x (rows, cols), row stride p.input_stride; y dense. Grid: persistent blocks. Group g of
// block b has the rows b * groups + g, + gridDim * groups, and so on.
template <class T, int kHeld, bool kCentered>
__global__ void __launch_bounds__(kNormPersistentThreads, 1)
    layer_norm_persistent_kernel(const LayerNormParams p, int lanes) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>;
  using Ring = RowRing<T, 1, kHeld>;
  using Meeting = MomentsMeeting<kCentered, Acc>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[Meeting::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.cols));
  Meeting meeting(group, meeting_storage);
  Ring ring(ring_storage, columns);

  const int64_t step = int64_t{gridDim.x} * group.count;
  const int64_t turns = ceil_div(p.rows - int64_t{blockIdx.x} * group.count, step);
  int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  auto copy = [&](int stage, int64_t r) {
    const T* const operands[1] = {static_cast<const T*>(p.input) + r * p.input_stride};
    ring.copy(stage, operands, r < p.rows);
  };
#pragma unroll 1
  for (int stage = 0; stage < Ring::kStages; ++stage) copy(stage, row + stage * step);
  Affine<T, kVec> affine[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) affine[i].load(p, columns.first(i), columns.has(i));

  for (int64_t turn = 0; turn < turns; ++turn, row += step) {
    ring.wait();
    Vec<T, kVec> x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[i] = ring.read(0, i);
    const T* const next[1] = {static_cast<const T*>(p.input) +
                              (row + Ring::kStages * step) * p.input_stride};
    ring.replace(next, row + Ring::kStages * step < p.rows);
    const auto moments = row_moments<kCentered>(x, columns, static_cast<int>(p.cols), meeting);
    const Acc rstd = rstd_of(p, moments.squares);
    if (row >= p.rows) continue;
    if (columns.lane == 0) save_statistics(p, row, moments.mean, rstd);
    T* y = static_cast<T*>(p.output) + row * p.cols;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!columns.has(i)) continue;
      store_vec_global(y + columns.first(i),
                       affine[i].template apply<kCentered>(x[i], moments.mean, rstd));
    }
  }
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
  const auto moments = row_moments<kCentered>(x, columns, static_cast<int>(p.cols), meeting);
  const Acc rstd = rstd_of(p, moments.squares);
  if (!present) return;
  if (columns.lane == 0) save_statistics(p, row, moments.mean, rstd);
  T* y = static_cast<T*>(p.output) + row * p.cols;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!columns.has(i)) continue;
    const int column = columns.first(i);
    Affine<T, kVec> affine;
    affine.load(p, column, true);
    store_vec_global(y + column, affine.template apply<kCentered>(x[i], moments.mean, rstd));
  }
}

// Calls f(column, vector) for this thread's vectors of the block's row.
template <int kVec, class T, class F>
__device__ __forceinline__ void for_vectors(const T* row, int64_t cols, F&& f) {
  const int64_t step = int64_t{blockDim.x} * kVec;
#pragma unroll 4
  for (int64_t c = int64_t{threadIdx.x} * kVec; c < cols; c += step) f(c, load_vec<kVec>(row + c));
}

// Layout: as above. Grid: one block per row. The second and third read usually come from L2.
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
  const Acc rstd = rstd_of(p, squares);
  if (threadIdx.x == 0) save_statistics(p, row, mean, rstd);
  T* y = static_cast<T*>(p.output) + row * p.cols;
  for_vectors<kVec>(x, p.cols, [&](int64_t column, const Vec<T, kVec>& v) {
    Affine<T, kVec> affine;
    affine.load(p, column, true);
    store_vec(y + column, affine.template apply<kCentered>(v, mean, rstd));
  });
}

template <class T, bool kCentered>
void launch_persistent(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  for_int<1, 2, 4>(plan.vectors, [&]<int kHeld>() {
    launch(layer_norm_persistent_kernel<T, kHeld, kCentered>,
           dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
           row_ring_bytes(plan.threads, 1, kHeld), stream, p, plan.lanes);
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
        if (plan.form == NormForm::kPersistent) {
          return launch_persistent<T, kCentered>(p, plan, stream);
        }
        if (plan.form == NormForm::kHeld) return launch_held<T, kVec, kCentered>(p, plan, stream);
        launch(layer_norm_looped_kernel<T, kVec, kCentered>,
               dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p);
      });
    });
  });
}

}  // namespace warpwright
