// Forward and gradient of a row whose logits shared memory holds: one read, one write. What a team
// of blocks (one, or a cluster) adds is its Team's business.
#pragma once

#include "device/mma_sm80.cuh"
#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace warpwright {

// A row belongs to one block.
struct OneBlock {
  static __device__ __forceinline__ int rank() { return 0; }
  static __device__ __forceinline__ int size() { return 1; }
  template <class Sums>
  __device__ __forceinline__ void merge(Sums&) const {}
  __device__ __forceinline__ void leave() const {}
};

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride; the
// gradient may lie in the logits' place. Grid: a row belongs to `lanes` threads of each of
// team.size() neighbouring blocks; up to a warp's worth of lanes, a block has blockDim / lanes
// rows. Block k of a team takes the k-th part of the row's vectors, thread t of it vectors t + i *
// lanes; the first block also has what comes before the first 16-byte boundary and after the last.
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

  // A row in shared memory fits 32 bits.
  const int classes = active ? static_cast<int>(p.classes) : 0;
  int head = 0;
  if constexpr (kVec > 1) {
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(z) % kVecBytes / sizeof(T));
    head = misaligned == 0 ? 0 : kVec - misaligned;
    if (head > classes) head = classes;
  }
  const int vectors = (classes - head) / kVec;
  const int share = (vectors + team.size() - 1) / team.size();
  const int first = team.rank() * share;
  const int last = first + share < vectors ? first + share : vectors;
  const int scalars = team.rank() == 0 ? classes - vectors * kVec : 0;
  auto scalar_class = [&](int i) { return i < head ? i : i + vectors * kVec; };

  auto* copy = reinterpret_cast<Vec<T, kVec>*>(storage) + threadIdx.x;
  for (int i = 0, at = first + lane; at < last; ++i, at += lanes) {
    if constexpr (kVec > 1) {
      cp_async<16>(smem_address(&copy[i * blockDim.x]), z + head + at * kVec);
    } else {
      copy[i * blockDim.x] = load_vec<kVec>(z + at);
    }
  }
  cp_async_commit();
  cp_async_wait<0>();

  Sums sums;
#pragma unroll 2
  for (int i = 0, at = first + lane; at < last; ++i, at += lanes) {
    const Vec<T, kVec> value = copy[i * blockDim.x];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const Acc z_j = convert<Acc>(value[j]);
      sums.max = z_j > sums.max ? z_j : sums.max;
    }
  }
  const Acc to = Sums::reference(sums.max);
#pragma unroll 2
  for (int i = 0, at = first + lane; at < last; ++i, at += lanes) {
    const Vec<T, kVec> value = copy[i * blockDim.x];
    Acc part = 0, part_linear = 0, part_mass = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const Acc distance = convert<Acc>(value[j]) - to;
      part += exp_for<T>(distance);
      if constexpr (Sums::kLinear) {
        const Acc wq = weighted_target<kKind>(p, smoothing, head + at * kVec + j, Acc(0));
        part_linear += wq * distance;
        part_mass += wq;
      }
    }
    sums.sum += part;
    sums.linear += part_linear;
    sums.mass += part_mass;
  }
  for (int i = lane; i < scalars; i += lanes) {
    const int c = scalar_class(i);
    const Acc value[1] = {convert<Acc>(z[c])};
    const Acc wq[1] = {weighted_target<kKind>(p, smoothing, c, Acc(0))};
    const bool present[1] = {true};
    sums.template add<1, 1>(value, wq, present);
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
  __syncwarp();  // the label's logit has been read: its place may be written

  LossShare<Acc> total;
  if (speaks) total = finish_row<T, kKind>(p, smoothing, row, label, label_logit, sums);
  if (active && p.grad_input != nullptr) {
    if constexpr (kKind == TargetKind::kSmoothedLabels) {
      if (label.valid) sums.mass += smoothing.keep * class_weight<Acc>(p, label.value);
    }
    Acc g = 1;
    if (p.grad_output != nullptr) {
      g = static_cast<const Acc*>(p.grad_output)[p.grad_per_row ? row : int64_t{0}];
    }
    if (p.reduction == Reduction::kMean) g /= *static_cast<const Acc*>(p.total_weight);
    const RowGradient<T, kKind> gradient(p, label, sums.max, sums.sum, sums.mass, g);
    T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, row);
#pragma unroll 2
    for (int i = 0, at = first + lane; at < last; ++i, at += lanes) {
      Vec<T, kVec> value = copy[i * blockDim.x];
      if (gradient.zero) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) value[j] = convert<T>(Acc(0));
      }
      write_gradients<T, T, kKind, kVec>(p, smoothing, gradient, head + at * kVec, value, nullptr,
                                         dz, nullptr);
    }
    for (int i = lane; i < scalars; i += lanes) {
      const int c = scalar_class(i);
      Vec<T, 1> value;
      value[0] = gradient.zero ? convert<T>(Acc(0)) : z[c];
      write_gradients<T, T, kKind, 1>(p, smoothing, gradient, c, value, nullptr, dz, nullptr);
    }
  }
  if (team.rank() == 0) finish_block<T>(p, total, shared_share, group, gridDim.x / team.size());
  team.leave();
}

// Blocks an SM must hold.
template <class T>
constexpr int kCrossEntropyTeams = sizeof(T) == 8 ? 2 : 4;

// Calls f<T, kKind, kVec>().
template <class F>
void for_gradient(const CrossEntropyGradientParams& p, const CrossEntropyGradientConfig& config,
                  F&& f) {
  for_dtype(p.dtype, [&]<class T>() {
    for_bool(p.kind == TargetKind::kSmoothedLabels, [&]<bool kSmoothed>() {
      constexpr TargetKind kKind = kSmoothed ? TargetKind::kSmoothedLabels : TargetKind::kLabels;
      if (config.vec > 1) {
        f.template operator()<T, kKind, kVecSize<T>>();
      } else {
        f.template operator()<T, kKind, 1>();
      }
    });
  });
}

void launch_cross_entropy_gradient_cluster(const CrossEntropyGradientParams& p,
                                           const CrossEntropyGradientConfig& config,
                                           cudaStream_t stream);

}  // namespace warpwright
