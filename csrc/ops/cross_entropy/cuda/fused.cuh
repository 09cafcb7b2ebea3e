// Forward and gradient of a row whose logits shared memory holds: one read, one write. A Team is
// the blocks that share a row (one, or a cluster); it adds their sums.
#pragma once

#include "device/mma_sm80.cuh"
#include "ops/cross_entropy/cuda/held_rows.cuh"
#include "ops/cross_entropy/cuda/row_gradient.cuh"

namespace warpwright {

// One block owns a row.
struct OneBlock {
  static __device__ __forceinline__ int rank() { return 0; }
  static __device__ __forceinline__ int size() { return 1; }
  template <class Sums>
  __device__ __forceinline__ void merge(Sums&) const {}
  __device__ __forceinline__ void leave() const {}
};

// The gradient's factors, from the sums of the whole row.
template <class T, TargetKind kKind>
__device__ __forceinline__ RowGradient<T, kKind> row_gradient(const CrossEntropyGradientParams& p,
                                                              const Smoothing<Accum<T>>& smoothing,
                                                              int64_t row, const Label& label,
                                                              RowSums<T, kKind> sums) {
  using Acc = Accum<T>;
  if constexpr (kKind == TargetKind::kSmoothedLabels) {
    if (label.valid) sums.mass += smoothing.keep * class_weight<Acc>(p, label.value);
  }
  Acc g = 1;
  if (p.grad_output != nullptr) {
    g = static_cast<const Acc*>(p.grad_output)[p.grad_per_row ? row : int64_t{0}];
  }
  if (p.reduction == LossReduction::kMean) g /= *static_cast<const Acc*>(p.total_weight);
  return {p, label, sums.max, sums.sum, sums.mass, g};
}

template <class T, TargetKind kKind, int kVec>
__device__ __forceinline__ void write_vectors(const CrossEntropyProblem& p,
                                              const Smoothing<Accum<T>>& smoothing,
                                              const RowGradient<T, kKind>& gradient,
                                              const RowPart<kVec>& part,
                                              const HeldVectors<T, kVec>& held, T* dz) {
  using Acc = Accum<T>;
  const Vec<T, kVec>* copy = held.copy;
  T* place = dz + part.head + (part.first + held.lane) * kVec;
#pragma unroll 2
  for (int at = part.first + held.lane; at < part.last;
       at += held.lanes, copy += held.pitch, place += held.lanes * kVec) {
    Acc result[kVec] = {};
    if (!gradient.zero) {
      const Vec<Acc, kVec> z = widen(load_whole(copy));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Acc distance = gradient.distance(z[j]);
        result[j] = kKind == TargetKind::kLabels
                        ? gradient.of_no_label(distance)
                        : gradient(distance, weighted_target<kKind>(
                                                 p, smoothing, part.head + at * kVec + j, Acc(0)));
      }
    }
    store_converted<kVec>(place, result);
  }
  // The label's own element, rewritten by the thread that wrote its vector.
  const int label = static_cast<int>(gradient.label);
  const int element = label - part.head - part.first * kVec;
  if (element >= 0 && element < (part.last - part.first) * kVec &&
      element / kVec % held.lanes == held.lane) {
    const T z = held.copy[element / kVec / held.lanes * held.pitch].data[element % kVec];
    dz[label] = convert<T>(
        gradient.at_label(convert<Acc>(z), class_weight<Acc>(p, gradient.label), smoothing));
  }
}

template <class T, TargetKind kKind>
__device__ __forceinline__ void write_scalar(const CrossEntropyProblem& p,
                                             const Smoothing<Accum<T>>& smoothing,
                                             const RowGradient<T, kKind>& gradient, int c, T z,
                                             T* dz) {
  Vec<T, 1> value;
  value[0] = gradient.zero ? convert<T>(Accum<T>(0)) : z;
  write_gradients<T, T, kKind, 1>(p, smoothing, gradient, c, value, nullptr, dz, nullptr);
}

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride. The
// gradient may overwrite the logits. Grid: `lanes` threads of each of team.size() consecutive
// blocks own a row. With lanes up to a warp, a block has blockDim / lanes rows.
template <class T, TargetKind kKind, int kVec, class Team>
__device__ __forceinline__ void cross_entropy_gradient_rows(const CrossEntropyGradientParams& p,
                                                            const Smoothing<Accum<T>>& smoothing,
                                                            int lanes, const Team& team) {
  using Acc = Accum<T>;
  using Sums = RowSums<T, kKind>;
  extern __shared__ uint4 storage[];
  __shared__ Acc shared_sums[kCrossEntropyTeam / kWarpSize][4];
  __shared__ Acc shared_share[kCrossEntropyTeam / kWarpSize];

  const bool whole_block = lanes > kWarpSize;
  const int lane = whole_block ? threadIdx.x : threadIdx.x & (lanes - 1);
  const int64_t group = blockIdx.x / team.size();
  const int64_t row = whole_block ? group : group * (blockDim.x / lanes) + threadIdx.x / lanes;
  const bool active = row < p.rows;
  const T* z = static_cast<const T*>(p.input) + (active ? row_offset(p.layout, row) : 0);
  Label label{-1, false, false};
  Acc label_logit = 0;
  if (active) label = load_label(p, row);
  const bool speaks = active && lane == 0 && team.rank() == 0;
  if (speaks && label.valid) label_logit = convert<Acc>(z[label.value]);

  const int classes = active ? static_cast<int>(p.classes) : 0;
  const int share = (classes / kVec + team.size() - 1) / team.size();
  const RowPart<kVec> part(z, classes, team.rank(), share);
  auto* copy = reinterpret_cast<Vec<T, kVec>*>(storage) + threadIdx.x;
  for (int i = 0, at = part.first + lane; at < part.last; ++i, at += lanes) {
    if constexpr (kVec > 1) {
      cp_async<16>(smem_address(&copy[i * blockDim.x]), z + part.head + at * kVec);
    } else {
      copy[i * blockDim.x] = load_vec<kVec>(z + at);
    }
  }
  cp_async_commit();
  cp_async_wait<0>();

  const HeldVectors<T, kVec> held{copy, static_cast<int>(blockDim.x), lane, lanes};
  Sums sums = sum_vectors<T, kKind>(p, smoothing, part, held);
  for (int i = lane; i < part.scalars; i += lanes) {
    const int c = part.scalar_class(i);
    add_scalar(p, smoothing, c, z[c], sums);
  }

  for (int offset = (whole_block ? kWarpSize : lanes) / 2; offset > 0; offset /= 2) {
    sums.merge(sums.from_lane(offset));
  }
  if (whole_block) {
    const int warp = threadIdx.x / kWarpSize, in_warp = threadIdx.x % kWarpSize;
    if (in_warp == 0) sums.store(shared_sums[warp]);
    __syncthreads();
    sums = Sums();
    if (in_warp < blockDim.x / kWarpSize) sums.load(shared_sums[in_warp]);
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sums.merge(sums.from_lane(offset));
  }
  team.merge(sums);
  __syncwarp();  // after this, the label's logit may be overwritten

  LossShare<Acc> total;
  if (speaks) total = finish_row<T, kKind>(p, smoothing, row, label, label_logit, sums);
  if (active && p.grad_input != nullptr) {
    const RowGradient<T, kKind> gradient = row_gradient(p, smoothing, row, label, sums);
    T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, row);
    write_vectors(p, smoothing, gradient, part, held, dz);
    for (int i = lane; i < part.scalars; i += lanes) {
      const int c = part.scalar_class(i);
      write_scalar(p, smoothing, gradient, c, z[c], dz);
    }
  }
  if (team.rank() == 0) finish_block<T>(p, total, shared_share, group, gridDim.x / team.size());
  team.leave();
}

// Minimum blocks per SM.
template <class T>
constexpr int kCrossEntropyTeams = sizeof(T) == 8 ? 2 : 4;

// Calls f<T, kKind, kVec>().
template <class F>
void for_gradient(const CrossEntropyGradientParams& p, const CrossEntropyGradientPlan& plan,
                  F&& f) {
  for_dtype(p.dtype, [&]<class T>() {
    for_bool(p.kind == TargetKind::kSmoothedLabels, [&]<bool kSmoothed>() {
      constexpr TargetKind kKind = kSmoothed ? TargetKind::kSmoothedLabels : TargetKind::kLabels;
      if (plan.vec > 1) {
        f.template operator()<T, kKind, kVecSize<T>>();
      } else {
        f.template operator()<T, kKind, 1>();
      }
    });
  });
}

void launch_cross_entropy_gradient_cluster(const CrossEntropyGradientParams& p,
                                           const CrossEntropyGradientPlan& plan,
                                           cudaStream_t stream);

// For labels, after the kernel that has counted them for a mean.
void launch_cross_entropy_gradient_persistent(const CrossEntropyGradientParams& p,
                                              const CrossEntropyGradientPlan& plan,
                                              cudaStream_t stream);

void launch_cross_entropy_gradient_ring(const CrossEntropyGradientParams& p,
                                        const CrossEntropyGradientPlan& plan, cudaStream_t stream);

}  // namespace warpwright
