// Selects the kernel of a forward call; the kernels of rows that persistent blocks do not take: a
// block holds its rows, or it reads a row three times.
#include "ops/layer_norm/cuda/forward.cuh"
#include "ops/layer_norm/cuda/types.cuh"

namespace warpwright {
namespace {

// Layout: x (rows, cols), row stride p.input_stride; y dense. Grid: a block has blockDim / lanes
// rows. A thread holds kHeld vectors of its row.
template <class T, class O, int kVec, int kHeld, bool kCentered>
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
  O* y = static_cast<O*>(p.output) + row * p.cols;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!columns.has(i)) continue;
    const int column = columns.first(i);
    Affine<T, kVec> affine;
    affine.load(p, column, true);
    store_vec_global(y + column, affine.template apply<O, kCentered>(x[i], moments.mean, rstd));
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
template <class T, class O, int kVec, bool kCentered>
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
  O* y = static_cast<O*>(p.output) + row * p.cols;
  for_vectors<kVec>(x, p.cols, [&](int64_t column, const Vec<T, kVec>& v) {
    Affine<T, kVec> affine;
    affine.load(p, column, true);
    store_vec(y + column, affine.template apply<O, kCentered>(v, mean, rstd));
  });
}

template <class T, class O, bool kCentered>
void launch_in_form(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(plan.blocks)), threads(plan.threads);
  if (plan.form == NormForm::kPersistent) {
    return for_int<1, 2>(plan.vectors, [&]<int kHeld>() {
      launch_persistent<T, O, void, kHeld, kCentered>(p, plan, stream);
    });
  }
  for_bool(plan.vec > 1, [&]<bool kVectorized>() {
    constexpr int kVec = kVectorized ? kVecSize<T> : 1;
    constexpr int kHeld = kVectorized ? kNormMaxVectors : kNormElementVectors;
    if (plan.form == NormForm::kHeld) {
      launch(layer_norm_held_kernel<T, O, kVec, kHeld, kCentered>, blocks, threads, 0, stream, p,
             plan.lanes);
    } else {
      launch(layer_norm_looped_kernel<T, O, kVec, kCentered>, blocks, threads, 0, stream, p);
    }
  });
}

}  // namespace

void launch_layer_norm(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  for_norm_types(p.dtype, p.output_dtype, [&]<class T, class O>() {
    for_bool(p.centered,
             [&]<bool kCentered>() { launch_in_form<T, O, kCentered>(p, plan, stream); });
  });
}

}  // namespace warpwright
