// Forward for contiguous classes: one read of the logits with an online maximum and sum, kUnroll
// 16-byte loads in flight per thread. Reduced losses take a second, small launch unless one block
// does everything. No atomics, so the order of every sum is fixed.
#include "device/dependent_launch.cuh"
#include "host/launch_cluster.h"
#include "host/sm90.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/cuda/cluster_loss_sm90.cuh"
#include "ops/cross_entropy/cuda/launch.h"
#include "ops/cross_entropy/cuda/row_sums.cuh"

namespace warpwright {
namespace {

constexpr int kReduceThreads = 1024;

// Adds class `c` of a row's head or tail.
template <TargetKind kKind, class T, class Q, class Sums>
__device__ __forceinline__ void add_scalar(Sums& sums, const CrossEntropyParams& p,
                                           const Smoothing<Accum<T>>& smoothing, const T* z,
                                           const Q* q, int64_t c) {
  using Acc = Accum<T>;
  Acc target = 0;
  if constexpr (kKind == TargetKind::kProbabilities) target = convert<Acc>(q[c]);
  const Acc value[1] = {convert<Acc>(z[c])};
  const Acc wq[1] = {weighted_target<kKind>(p, smoothing, c, target)};
  const bool present[1] = {true};
  sums.template add<1, 1>(value, wq, present);
}

// Merges the sums of the `lanes` threads that share a row into those of its lane 0. `shared` has a
// slot per warp, for rows of a whole block.
template <class Sums, class Acc>
__device__ __forceinline__ void merge_group(Sums& sums, int lanes, Acc (*shared)[4]) {
  for (int offset = (lanes < kWarpSize ? lanes : kWarpSize) / 2; offset > 0; offset /= 2) {
    sums.merge(sums.from_lane(offset));
  }
  if (lanes <= kWarpSize) return;
  const int warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) {
    sums.store(shared[warp]);
  }
  __syncthreads();
  if (warp == 0) {
    sums = Sums();
    if (threadIdx.x < num_warps) sums.load(shared[threadIdx.x]);
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      sums.merge(sums.from_lane(offset));
    }
  }
  __syncthreads();  // before the next row overwrites the slots
}

// Layout: logits (rows, classes), class stride 1; row r starts at row_offset(layout, r). Grid:
// `lanes` threads share a row, blockDim / lanes rows per block, strided over the rows. kVec > 1: a
// scalar head up to the first 16-byte boundary of the row, vectors, a scalar tail.
template <class T, class Q, TargetKind kKind, int kVec>
__global__ void __launch_bounds__(kMaxCrossEntropyThreads, kCrossEntropyBlocks<T>)
    cross_entropy_fwd_rows_kernel(const CrossEntropyParams p, const Smoothing<Accum<T>> smoothing,
                                  int lanes, bool cluster) {
  using Acc = Accum<T>;
  using Sums = RowSums<T, kKind>;
  constexpr int kUnroll = kCrossEntropyUnroll<T, kKind, kVec>;
  constexpr int kCount = kUnroll * kVec;
  __shared__ Acc shared_sums[kMaxCrossEntropyThreads / kWarpSize][4];
  __shared__ Acc shared_share[kMaxCrossEntropyThreads / kWarpSize];

  if (gridDim.x > 1 && p.reduction != LossReduction::kNone && !cluster) let_next_kernel_start();
  const int lane = threadIdx.x & (lanes - 1);
  const int rows_per_block = blockDim.x / lanes;
  LossShare<Acc> total;
  for (int64_t first = int64_t{blockIdx.x} * rows_per_block; first < p.rows;
       first += int64_t{gridDim.x} * rows_per_block) {
    const int64_t row = first + threadIdx.x / lanes;
    const bool active = row < p.rows;
    const T* z = static_cast<const T*>(p.input) + (active ? row_offset(p.layout, row) : 0);
    const Q* q = nullptr;
    // Issued early: another load depends on it. The row's own loads come between the two.
    int64_t label_value = 0;
    if constexpr (kKind == TargetKind::kProbabilities) {
      q = static_cast<const Q*>(p.target) + (active ? row_offset(p.target_layout, row) : 0);
    } else if (active && lane == 0) {
      label_value = load_label_value(p, row);
    }

    Sums sums;
    int head = 0;
    int64_t vectors = 0;
    if constexpr (kVec > 1) head = scalar_head(z, p.classes, kVecBytes);
    if (active) vectors = (p.classes - head) / kVec;
    Vec<T, kVec> loaded[kUnroll], next[kUnroll];
    const int64_t step = int64_t{kUnroll} * lanes;
    auto fetch = [&](int64_t v, Vec<T, kVec>(&to)[kUnroll]) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = v + int64_t{u} * lanes;
        if (at < vectors) to[u] = load_vec<kVec>(z + head + at * kVec);
      }
    };
    fetch(lane, loaded);
    Acc label_logit = 0;
    if constexpr (kKind != TargetKind::kProbabilities) {
      if (active && lane == 0 && label_of(p, label_value).valid) {
        label_logit = convert<Acc>(z[label_value]);
      }
    }
    for (int64_t v = lane; v < vectors; v += step) {
      fetch(v + step, next);  // in flight while this part is summed
      Acc value[kCount], wq[kCount];
      bool present[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) present[u] = v + int64_t{u} * lanes < vectors;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t c = head + (v + int64_t{u} * lanes) * kVec;
        Acc target[kVec] = {};
        if constexpr (kKind == TargetKind::kProbabilities) {
          if (present[u]) load_converted<kVec>(q + c, target);
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          value[u * kVec + j] = present[u] ? convert<Acc>(loaded[u][j]) : -infinity(Acc());
          wq[u * kVec + j] =
              present[u] ? weighted_target<kKind>(p, smoothing, c + j, target[j]) : Acc(0);
        }
      }
      sums.template add<kCount, kVec>(value, wq, present);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[u] = next[u];
    }
    if constexpr (kVec > 1) {
      const int64_t body = vectors * kVec;
      const int64_t scalars = active ? p.classes - body : 0;
      for (int64_t i = lane; i < scalars; i += lanes) {
        add_scalar<kKind>(sums, p, smoothing, z, q, i < head ? i : i + body);
      }
    }

    merge_group(sums, lanes, shared_sums);
    if (active && lane == 0) {
      Label label{-1, true, false};
      if constexpr (kKind != TargetKind::kProbabilities) label = label_of(p, label_value);
      total += finish_row<T, kKind>(p, smoothing, row, label, label_logit, sums);
    }
  }
  if (cluster) return finish_cluster<T>(p, total, shared_share);
  finish_block<T>(p, total, shared_share, blockIdx.x, gridDim.x);
}

// Layout: partials (num_partials, 2). Grid: one block, which starts while the blocks that write the
// partials end. Sums in double, at no cost here.
template <class T>
__global__ void __launch_bounds__(kReduceThreads)
    cross_entropy_reduce_kernel(const CrossEntropyParams p, int64_t num_partials) {
  __shared__ double shared[kReduceThreads / kWarpSize];
  wait_for_previous_kernel();
  const Vec<Accum<T>, 2>* partials = static_cast<const Vec<Accum<T>, 2>*>(p.partials);
  double loss = 0, weight = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < num_partials; i += kReduceThreads) {
    const Vec<Accum<T>, 2> partial = partials[i];
    loss += partial[0];
    weight += partial[1];
  }
  loss = block_reduce(loss, Sum{}, 0.0, shared);
  weight = block_reduce(weight, Sum{}, 0.0, shared);
  if (threadIdx.x == 0) write_reduced<T>(p, loss, weight);
}

}  // namespace

void launch_cross_entropy_reduce(const CrossEntropyParams& p, int64_t count, cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    launch_dependent(cross_entropy_reduce_kernel<T>, dim3(1), dim3(kReduceThreads), 0, stream, p,
                     count);
  });
}

void launch_cross_entropy(const CrossEntropyParams& params, const CrossEntropyPlan& plan,
                          void* workspace, cudaStream_t stream) {
  CrossEntropyParams p = params;
  p.partials = workspace;
  if (plan.kernel == CrossEntropyPlan::Kernel::kPixels) {
    launch_cross_entropy_fwd_pixels(p, plan, stream);
  } else if (plan.kernel == CrossEntropyPlan::Kernel::kPersistent) {
    launch_cross_entropy_fwd_persistent(p, plan, stream);
  } else {
    for_cross_entropy(p, [&]<class T, class Q, TargetKind kKind>() {
      auto run = [&]<int kVec>() {
        launch_clusters(cross_entropy_fwd_rows_kernel<T, Q, kKind, kVec>,
                        dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                        plan.cluster ? static_cast<int>(plan.blocks) : 1, 0, stream, p,
                        Smoothing<Accum<T>>(p), plan.lanes, plan.cluster);
      };
      if (plan.vec > 1) {
        run.template operator()<kVecSize<T>>();
      } else {
        run.template operator()<1>();
      }
    });
  }
  if (plan.partials != 0) launch_cross_entropy_reduce(p, plan.partials, stream);
}

}  // namespace warpwright
