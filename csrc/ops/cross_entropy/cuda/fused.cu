// Loss and gradient in one pass: count the labels if a mean must divide by them, then the rows,
// then the sum of the blocks' losses. Rows that shared memory cannot hold take the forward, then
// the backward.
#include "device/dependent_launch.cuh"
#include "host/launch.h"
#include "host/sm90.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/cuda/fused.cuh"
#include "ops/cross_entropy/cuda/launch.h"

namespace warpwright {
namespace {

constexpr int kCountThreads = 1024;
constexpr int kScaleThreads = 256;

// Layout: labels (rows); counts, one per block. Grid: any size, strided. Computes before the rows
// are read the sum that finish_row() would add.
template <class Acc>
__global__ void __launch_bounds__(kCountThreads)
    cross_entropy_count_kernel(const CrossEntropyProblem p, Acc* counts) {
  __shared__ double shared[kCountThreads / kWarpSize];
  let_next_kernel_start();
  double total = 0;
  const int64_t step = int64_t{gridDim.x} * kCountThreads;
#pragma unroll 8
  for (int64_t row = int64_t{blockIdx.x} * kCountThreads + threadIdx.x; row < p.rows; row += step) {
    const Label label = load_label(p, row);
    if (label.valid) total += class_weight<Acc>(p, label.value);
  }
  total = block_reduce(total, Sum{}, 0.0, shared);
  if (threadIdx.x == 0) counts[blockIdx.x] = static_cast<Acc>(total);
}

// See cross_entropy_gradient_rows().
template <class T, TargetKind kKind, int kVec>
__global__ void __launch_bounds__(kCrossEntropyTeam, kCrossEntropyTeams<T>)
    cross_entropy_gradient_kernel(const CrossEntropyGradientParams p,
                                  const Smoothing<Accum<T>> smoothing, int lanes) {
  cross_entropy_gradient_rows<T, kKind, kVec>(p, smoothing, lanes, OneBlock());
}

// Layout: `numel` contiguous elements. Grid: as many threads as are resident, in steps of kVec
// elements. A factor of 1, the gradient of a loss at the end of a graph, costs one read of the
// factor. Zeros stay zero, so that a factor of infinity or NaN does not reach ignored rows.
template <class T, int kVec>
__global__ void __launch_bounds__(kScaleThreads)
    cross_entropy_scale_kernel(T* data, int64_t numel, const void* factor_data, DType factor_type) {
  using Acc = Accum<T>;
  const Acc factor = read_either<T>(factor_data, factor_type, 0);
  if (factor == Acc(1)) return;
  auto scaled = [factor](T element) {
    const Acc value = convert<Acc>(element);
    return value == Acc(0) ? element : convert<T>(value * factor);
  };
  const int64_t start = int64_t{blockIdx.x} * kScaleThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kScaleThreads;
  const int64_t vectors = numel / kVec;
#pragma unroll 4
  for (int64_t v = start; v < vectors; v += step) {
    Vec<T, kVec> value = load_vec<kVec>(data + v * kVec);
#pragma unroll
    for (int j = 0; j < kVec; ++j) value[j] = scaled(value[j]);
    store_vec(data + v * kVec, value);
  }
  for (int64_t i = vectors * kVec + start; i < numel; i += step) {
    data[i] = scaled(data[i]);
  }
}

}  // namespace

void launch_cross_entropy_fused(const CrossEntropyGradientParams& params,
                                const CrossEntropyFusedPlan& plan, void* workspace,
                                cudaStream_t stream) {
  const CrossEntropyGradientPlan& fused = plan.fused;
  if (!fused.on_chip) {
    launch_cross_entropy(params, plan.forward, workspace, stream);
    if (params.grad_input != nullptr && params.rows * params.classes != 0) {
      launch_cross_entropy_backward(backward_of(params), plan.backward, stream);
    }
    return;
  }
  CrossEntropyGradientParams p = params;
  p.partials = workspace;
  if (p.reduction == LossReduction::kMean && p.grad_input != nullptr) {
    for_bool(p.dtype == DType::kFloat64, [&]<bool kDouble>() {
      using Acc = std::conditional_t<kDouble, double, float>;
      Acc* counts = fused.counts > 1 ? static_cast<Acc*>(workspace) + 2 * fused.partials
                                     : static_cast<Acc*>(p.total_weight);
      launch(cross_entropy_count_kernel<Acc>, dim3(static_cast<unsigned>(fused.counts)),
             dim3(kCountThreads), 0, stream, p, counts);
      p.counts = counts;
    });
    p.num_counts = fused.counts;
    p.counted = true;
  }
  if (fused.is_persistent()) {
    launch_cross_entropy_gradient_persistent(p, fused, stream);
  } else if (fused.is_ring()) {
    launch_cross_entropy_gradient_ring(p, fused, stream);
  } else if (fused.cluster > 1) {
    launch_cross_entropy_gradient_cluster(p, fused, stream);
  } else {
    for_gradient(p, fused, [&]<class T, TargetKind kKind, int kVec>() {
      launch(cross_entropy_gradient_kernel<T, kKind, kVec>,
             dim3(static_cast<unsigned>(fused.blocks)), dim3(fused.threads),
             fused.smem_bytes(p.dtype), stream, p, Smoothing<Accum<T>>(p), fused.lanes);
    });
  }
  if (fused.partials != 0) launch_cross_entropy_reduce(p, fused.partials, stream);
}

void launch_cross_entropy_scale(void* gradient, int64_t numel, DType dtype, const void* factor,
                                DType factor_dtype, cudaStream_t stream) {
  if (numel == 0) return;
  for_dtype(dtype, [&]<class T>() {
    const int64_t needed = ceil_div(numel, int64_t{4} * kScaleThreads * kVecSize<T>);
    const int64_t resident = int64_t{current_device_info().num_sms} * 8;
    const dim3 grid(static_cast<unsigned>(needed < resident ? needed : resident));
    auto run = [&]<int kVec>() {
      launch(cross_entropy_scale_kernel<T, kVec>, grid, dim3(kScaleThreads), 0, stream,
             static_cast<T*>(gradient), numel, factor, factor_dtype);
    };
    if (is_vec_aligned(reinterpret_cast<uintptr_t>(gradient))) {
      run.template operator()<kVecSize<T>>();
    } else {
      run.template operator()<1>();
    }
  });
}

}  // namespace warpwright
