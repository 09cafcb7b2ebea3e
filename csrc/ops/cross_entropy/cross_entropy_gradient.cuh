// Forward and gradient of rows whose logits pass through shared memory: one read, one write. Every
// thread copies what it will use itself, so that a ring of rows needs no barriers: the next rows
// are on their way while one is summed and its gradient written. What a team of blocks (one, or a
// cluster) adds is its Team's business.
#pragma once

#include "device/mma_sm80.cuh"
#include "ops/cross_entropy/cross_entropy_device.cuh"

namespace warpwright {

// A row belongs to one block.
struct OneBlock {
  static __device__ __forceinline__ int rank() { return 0; }
  static __device__ __forceinline__ int log2_size() { return 0; }
  static __device__ __forceinline__ int lag() { return 0; }
  __device__ __forceinline__ void begin() const {}

  template <class Sums>
  __device__ __forceinline__ Sums exchange(const typename Sums::Acc (*warp_sums)[4], int,
                                           int) const {
    __syncthreads();
    return merge_warps<Sums>(warp_sums);
  }
};

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride; the
// gradient may lie in the logits' place. Grid: as many blocks as are resident. A row belongs to
// `lanes` threads of each of the team's neighbouring blocks; up to a warp's worth of lanes, a block
// has blockDim / lanes rows at once. Block k of a team takes the k-th part of the row's vectors,
// thread t of it vectors t + i * lanes; the first block also has what comes before the first
// 16-byte boundary and after the last.
// Step s sums row s of the team and writes the gradient of row s - team.lag(); then the slot is
// free for the row `slots` further on. slots = lag + 2, or 1.
template <class T, TargetKind kKind, int kVec, class Team>
__device__ __forceinline__ void cross_entropy_gradient_rows(const CrossEntropyGradientParams& p,
                                                            const Smoothing<Accum<T>>& smoothing,
                                                            int lanes, int slots, int slot_vectors,
                                                            const Team& team) {
  using Acc = Accum<T>;
  using Sums = RowSums<T, kKind>;
  using Vector = Vec<T, kVec>;
  constexpr int kWarps = cross_entropy_team(sizeof(T), kKind) / kWarpSize;
  extern __shared__ uint4 storage[];
  __shared__ Acc shared_sums[2][kWarps][4];
  __shared__ Acc shared_share[kWarps];

  const bool whole_block = lanes > kWarpSize;
  const int lane = whole_block ? threadIdx.x : threadIdx.x & (lanes - 1);
  const int at_once = whole_block ? 1 : blockDim.x / lanes;
  const int group = blockIdx.x >> team.log2_size();
  const int groups = gridDim.x >> team.log2_size();
  const int stride = groups * at_once;
  // The same for all threads of a block, so that warps stay whole.
  const int steps = static_cast<int>((p.rows - int64_t{group} * at_once + stride - 1) / stride);
  const bool speaks = lane == 0 && team.rank() == 0;

  // This block's part of a row; nothing of a row that is none.
  struct Part {
    const T* z;
    int head, body, first, last, scalars;
    // The i-th class that is in no vector.
    __device__ __forceinline__ int scalar_class(int i) const { return i < head ? i : i + body; }
  };
  auto part_of = [&](int64_t row) {
    Part part{};
    if (row >= p.rows) return part;
    // A row in shared memory fits 32 bits.
    const int classes = static_cast<int>(p.classes);
    part.z = static_cast<const T*>(p.input) + row_offset(p.layout, row);
    if constexpr (kVec > 1) {
      const int misaligned =
          static_cast<int>(reinterpret_cast<uintptr_t>(part.z) % kVecBytes / sizeof(T));
      part.head = misaligned == 0 ? 0 : kVec - misaligned;
      if (part.head > classes) part.head = classes;
    }
    const int vectors = (classes - part.head) / kVec;
    const int share = (vectors + (1 << team.log2_size()) - 1) >> team.log2_size();
    part.body = vectors * kVec;
    part.first = team.rank() * share;
    part.last = part.first + share < vectors ? part.first + share : vectors;
    if (team.rank() == 0) part.scalars = classes - part.body;
    return part;
  };

  auto slot_of = [&](int slot) {
    return reinterpret_cast<Vector*>(storage) + slot * slot_vectors + threadIdx.x;
  };
  auto fetch = [&](int64_t row, int slot) {
    const Part part = part_of(row);
    Vector* copy = slot_of(slot);
    for (int at = part.first + lane; at < part.last; at += lanes, copy += blockDim.x) {
      if constexpr (kVec > 1) {
        cp_async<16>(smem_address(copy), part.z + part.head + at * kVec);
      } else {
        *copy = load_vec<kVec>(part.z + at);
      }
    }
    cp_async_commit();
  };

  Acc g_all = 1;  // what every row's gradient is multiplied by
  if (p.grad_input != nullptr) {
    if (p.grad_output != nullptr && !p.grad_per_row)
      g_all = *static_cast<const Acc*>(p.grad_output);
    if (p.reduction == Reduction::kMean) g_all /= *static_cast<const Acc*>(p.total_weight);
  }

  // A row between its sums and its gradient. What is loaded early stays as it came: the first use
  // of it waits.
  struct Row {
    int64_t raw_label;
    T label_logit, scalar;
  };
  Row next{p.ignore_index, T(), T()}, done = next;
  int64_t row = int64_t{group} * at_once + (whole_block ? 0 : threadIdx.x / lanes);
  int slot = 0;
  for (int s = 0; s < slots; ++s) fetch(row + int64_t{s} * stride, s);
  int64_t raw_label = row < p.rows ? load_raw_label(p, row) : p.ignore_index;
  team.begin();

  LossShare<Acc> total;
  for (int step = 0; step < steps + team.lag(); ++step, row += stride) {
    Sums sums;
    next.raw_label = raw_label;
    if (row + stride < p.rows) raw_label = load_raw_label(p, row + stride);
    if (step < steps) {
      const Part part = part_of(row);
      if (speaks && row < p.rows) {
        const Label label = classify_label(p, next.raw_label);
        if (label.valid) next.label_logit = part.z[label.value];
      }
      if (lane < part.scalars) next.scalar = part.z[part.scalar_class(lane)];
      if (slots > 1) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      const Vector* copy = slot_of(slot);
#pragma unroll(Sums::kLinear ? 2 : 4)
      for (int at = part.first + lane; at < part.last; at += lanes, copy += blockDim.x) {
        const Vector value = *copy;
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums.max = larger(sums.max, convert<Acc>(value[j]));
      }
      const Acc to = Sums::reference(sums.max);
      copy = slot_of(slot);
#pragma unroll(Sums::kLinear ? 1 : 2)
      for (int at = part.first + lane; at < part.last; at += lanes, copy += blockDim.x) {
        const Vector value = *copy;
        Acc exps = 0, linear = 0, mass = 0;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const Acc distance = convert<Acc>(value[j]) - to;
          exps += exp_for<T>(distance);
          if constexpr (Sums::kLinear) {
            const Acc wq = weighted_target<kKind>(p, smoothing, part.head + at * kVec + j, Acc(0));
            linear += wq * distance;
            mass += wq;
          }
        }
        sums.sum += exps;
        sums.linear += linear;
        sums.mass += mass;
      }
      for (int i = lane; i < part.scalars; i += lanes) {
        const int c = part.scalar_class(i);
        const Acc value[1] = {convert<Acc>(i == lane ? next.scalar : part.z[c])};
        const Acc wq[1] = {weighted_target<kKind>(p, smoothing, c, Acc(0))};
        const bool present[1] = {true};
        sums.template add<1, 1>(value, wq, present);
      }
      sums = merge_lanes(sums, whole_block ? kWarpSize : lanes);
    }
    if (whole_block) {
      if (threadIdx.x % kWarpSize == 0) sums.store(shared_sums[step & 1][threadIdx.x / kWarpSize]);
      sums = team.template exchange<Sums>(shared_sums[step & 1], step, steps);
    } else {
      __syncwarp();  // the label's logit has been read: its place may be written
    }

    const Row now = team.lag() == 0 ? next : done;
    done = next;
    const int64_t now_row = row - team.lag() * stride;
    const int now_slot = slot >= team.lag() ? slot - team.lag() : slots - 1;
    slot = slot + 1 == slots ? 0 : slot + 1;
    if (step < team.lag()) continue;

    if (now_row < p.rows) {
      const Label label = classify_label(p, now.raw_label);
      if (speaks) {
        const LossShare<Acc> share =
            finish_row<T, kKind>(p, smoothing, now_row, label, convert<Acc>(now.label_logit), sums);
        total.loss += share.loss;
        total.weight += share.weight;
      }
      if (p.grad_input != nullptr) {
        if constexpr (kKind == TargetKind::kSmoothedLabels) {
          if (label.valid) sums.mass += smoothing.keep * class_weight<Acc>(p, label.value);
        }
        Acc g = g_all;
        if (p.grad_per_row) g *= static_cast<const Acc*>(p.grad_output)[now_row];
        const RowGradient<T, kKind> gradient(p, label, sums.max, sums.sum, sums.mass, g);
        T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, now_row);
        const Part part = part_of(now_row);
        const Vector* copy = slot_of(now_slot);
#pragma unroll(kVec > 4 ? 1 : 2)
        for (int at = part.first + lane; at < part.last; at += lanes, copy += blockDim.x) {
          Vector value = *copy;
          if (gradient.zero) {
#pragma unroll
            for (int j = 0; j < kVec; ++j) value[j] = convert<T>(Acc(0));
          }
          write_gradients<T, T, kKind, kVec>(p, smoothing, gradient, part.head + at * kVec, value,
                                             nullptr, dz, nullptr);
        }
        for (int i = lane; i < part.scalars; i += lanes) {
          const int c = part.scalar_class(i);
          Vec<T, 1> value;
          value[0] = gradient.zero ? convert<T>(Acc(0)) : i == lane ? now.scalar : part.z[c];
          write_gradients<T, T, kKind, 1>(p, smoothing, gradient, c, value, nullptr, dz, nullptr);
        }
      }
    }
    fetch(now_row + int64_t{slots} * stride, now_slot);
  }
  if (team.rank() == 0) finish_block<T>(p, total, shared_share, group, groups);
}

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

// How many teams there were.
int64_t launch_cross_entropy_gradient_cluster(const CrossEntropyGradientParams& p,
                                              const CrossEntropyGradientConfig& config,
                                              cudaStream_t stream);

}  // namespace warpwright
