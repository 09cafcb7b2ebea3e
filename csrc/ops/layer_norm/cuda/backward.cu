// Selects the kernels of a backward call; the kernels of rows that no group holds; the last sums.
#include "ops/layer_norm/cuda/backward.cuh"
#include "ops/layer_norm/cuda/types.cuh"

namespace warpwright {
namespace {

template <class Acc>
struct RowStatistics {
  Acc mean, rstd;
  __device__ __forceinline__ RowStatistics(const LayerNormBackwardParams& p, int64_t row)
      : mean(p.mean == nullptr ? Acc(0) : static_cast<const Acc*>(p.mean)[row]),
        rstd(static_cast<const Acc*>(p.rstd)[row]) {}
};

// Layout: x, dy (rows, cols), any row strides; dx dense. Grid: one block per row, which it reads
// twice.
template <class T, class O, int kVec, bool kCentered>
__global__ void __launch_bounds__(kNormLoopThreads)
    layer_norm_bwd_looped_kernel(const LayerNormBackwardParams p) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kMaxRowWarps];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
  const O* dy = static_cast<const O*>(p.grad_output) + row * p.grad_stride;
  T* dx = static_cast<T*>(p.grad_input) + row * p.cols;
  const RowStatistics<Acc> saved(p, row);
  auto for_vectors = [&](auto&& f) {
    const int64_t step = int64_t{blockDim.x} * kVec;
#pragma unroll 2
    for (int64_t c = int64_t{threadIdx.x} * kVec; c < p.cols; c += step) {
      Vec<Acc, kVec> xhat = widen(load_vec<kVec>(x + c)), grad = widen(load_vec<kVec>(dy + c));
#pragma unroll
      for (int j = 0; j < kVec; ++j) xhat[j] = (xhat[j] - saved.mean) * saved.rstd;
      if (p.weight.data != nullptr) {
        const auto weight =
            load_either<T, kVec>(p.weight.data, p.weight.dtype == DType::kFloat32, c);
#pragma unroll
        for (int j = 0; j < kVec; ++j) grad[j] = rounded_product(grad[j], weight[j]);
      }
      f(c, xhat, grad);
    }
  };
  Acc slope = 0, shift = 0;
  for_vectors([&](int64_t, const Vec<Acc, kVec>& xhat, const Vec<Acc, kVec>& grad) {
    slope += tree_sum<kVec>([&](int j) { return grad[j] * xhat[j]; });
    if constexpr (kCentered) shift += tree_sum<kVec>([&](int j) { return grad[j]; });
  });
  slope = block_reduce(slope, Sum{}, Acc(0), shared) / static_cast<Acc>(p.cols);
  if constexpr (kCentered) {
    shift = block_reduce(shift, Sum{}, Acc(0), shared) / static_cast<Acc>(p.cols);
  }
  for_vectors([&](int64_t c, const Vec<Acc, kVec>& xhat, const Vec<Acc, kVec>& grad) {
    Vec<Acc, kVec> result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) result[j] = saved.rstd * (grad[j] - shift - xhat[j] * slope);
    store_vec(dx + c, narrow<T>(result));
  });
}

constexpr int kSumThreads = 256;
constexpr int kSumRows = kSumThreads / kNormSumLanes;

// Adds up a column of the block in a fixed order; the first row of threads gets the sum.
template <class Acc>
__device__ __forceinline__ Acc sum_of_rows(Acc value, Acc (&shared)[kSumRows][kNormSumLanes]) {
  const int lane = threadIdx.x % kNormSumLanes;
  __syncthreads();
  shared[threadIdx.x / kNormSumLanes][lane] = value;
  __syncthreads();
  return tree_sum<kSumRows>([&](int r) { return shared[r][lane]; });
}

// Layout: x, dy as above; partials (2, splits, cols). Grid: block = (split, kNormSumLanes columns),
// columns fastest. A thread adds every kSumRows-th row of its split.
template <class T, class O>
__global__ void __launch_bounds__(kSumThreads)
    layer_norm_column_sums_kernel(const LayerNormBackwardParams p, int splits, Accum<T>* partials) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kSumRows][kNormSumLanes];
  const int64_t tiles = ceil_div<int64_t>(p.cols, kNormSumLanes);
  const int64_t split = blockIdx.x / tiles;
  const int64_t col = (blockIdx.x - split * tiles) * kNormSumLanes + threadIdx.x % kNormSumLanes;
  const int64_t end = (split + 1) * p.rows / splits;
  Acc by_weight = 0, by_bias = 0;
  if (col < p.cols) {
#pragma unroll 4
    for (int64_t row = split * p.rows / splits + threadIdx.x / kNormSumLanes; row < end;
         row += kSumRows) {
      const RowStatistics<Acc> saved(p, row);
      const Acc x = convert<Acc>(static_cast<const T*>(p.input)[row * p.input_stride + col]);
      const Acc dy = convert<Acc>(static_cast<const O*>(p.grad_output)[row * p.grad_stride + col]);
      by_weight += dy * ((x - saved.mean) * saved.rstd);
      by_bias += dy;
    }
  }
  by_weight = sum_of_rows(by_weight, shared);
  by_bias = sum_of_rows(by_bias, shared);
  if (threadIdx.x >= kNormSumLanes || col >= p.cols) return;
  partials[split * p.cols + col] = by_weight;
  partials[(splits + split) * p.cols + col] = by_bias;
}

// Layout: partials (2, parts, cols). Grid: block = (sum, kNormSumLanes columns), columns fastest.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    layer_norm_last_sums_kernel(const LayerNormBackwardParams p, int parts,
                                const Accum<T>* partials) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kSumRows][kNormSumLanes];
  const int64_t tiles = ceil_div<int64_t>(p.cols, kNormSumLanes);
  const int64_t which = blockIdx.x / tiles;
  const int64_t col = (blockIdx.x - which * tiles) * kNormSumLanes + threadIdx.x % kNormSumLanes;
  const NormVector target = which == 0 ? p.grad_weight : p.grad_bias;
  wait_for_previous_kernel();
  if (target.data == nullptr) return;
  Acc sum = 0;
  if (col < p.cols) {
    const Acc* column = partials + which * parts * p.cols + col;
#pragma unroll 8
    for (int part = threadIdx.x / kNormSumLanes; part < parts; part += kSumRows) {
      sum += column[part * p.cols];
    }
  }
  sum = sum_of_rows(sum, shared);
  if (threadIdx.x >= kNormSumLanes || col >= p.cols) return;
  if (sizeof(T) < sizeof(Acc) && target.dtype == DType::kFloat32) {
    static_cast<Acc*>(target.data)[col] = sum;
  } else {
    static_cast<T*>(target.data)[col] = convert<T>(sum);
  }
}

template <class T, class O, bool kCentered>
void launch_held(const LayerNormBackwardParams& p, const LayerNormBackwardPlan& plan,
                 Accum<T>* partials, cudaStream_t stream) {
  for_int<1, 2, 4>(plan.vectors, [&]<int kHeld>() {
    if constexpr (kHeld > norm_backward_vectors(sizeof(T), kCentered)) {
      throw std::logic_error("layer_norm_backward: no kernel for so many vectors per thread");
    } else {
      launch_bwd_held<T, O, void, kHeld, kCentered>(p, plan, partials, stream);
    }
  });
}

template <class T, class O, bool kCentered>
void launch_looped(const LayerNormBackwardParams& p, const LayerNormBackwardPlan& plan,
                   Accum<T>* partials, cudaStream_t stream) {
  if (p.grad_input != nullptr) {
    for_bool(plan.vec > 1, [&]<bool kVectorized>() {
      constexpr int kVec = kVectorized ? kVecSize<T> : 1;
      launch(layer_norm_bwd_looped_kernel<T, O, kVec, kCentered>,
             dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p);
    });
  }
  if (partials == nullptr) return;
  const int64_t tiles = ceil_div(p.cols, int64_t{kNormSumLanes});
  launch(layer_norm_column_sums_kernel<T, O>, dim3(static_cast<unsigned>(tiles * plan.splits)),
         dim3(kSumThreads), 0, stream, p, plan.splits, partials);
}

}  // namespace

void launch_last_sums(const LayerNormBackwardParams& p, int64_t parts, void* partials,
                      cudaStream_t stream) {
  const int64_t tiles = ceil_div(p.cols, int64_t{kNormSumLanes});
  for_dtype(p.dtype, [&]<class T>() {
    launch_dependent(layer_norm_last_sums_kernel<T>,
                     dim3(static_cast<unsigned>(tiles * (p.centered ? 2 : 1))), dim3(kSumThreads),
                     0, stream, p, static_cast<int>(parts), static_cast<Accum<T>*>(partials));
  });
}

void launch_layer_norm_backward(const LayerNormBackwardParams& p, const LayerNormBackwardPlan& plan,
                                void* workspace, cudaStream_t stream) {
  for_norm_types(p.dtype, p.grad_dtype, [&]<class T, class O>() {
    auto* partials = p.needs_sums() ? static_cast<Accum<T>*>(workspace) : nullptr;
    for_bool(p.centered, [&]<bool kCentered>() {
      if (plan.held) {
        launch_held<T, O, kCentered>(p, plan, partials, stream);
      } else {
        launch_looped<T, O, kCentered>(p, plan, partials, stream);
      }
    });
  });
  if (p.needs_sums()) {
    launch_last_sums(p, plan.held ? plan.blocks : plan.splits, workspace, stream);
  }
}

}  // namespace warpwright
