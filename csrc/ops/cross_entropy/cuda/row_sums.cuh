// The forward of a row: its online sums, its loss, and the reduction over rows.
#pragma once

#include "ops/cross_entropy/cuda/row_math.cuh"

namespace warpwright {

// Running sums of a part of a row, relative to its maximum so far (to 0 while that is -inf): sum =
// sum exp(z - max). Unless q is one-hot: linear = sum w q (z - max) and mass = sum w q.
template <class T, TargetKind kKind>
struct RowSums {
  using Acc = Accum<T>;
  static constexpr bool kLinear = kKind != TargetKind::kLabels;
  Acc max, sum, linear, mass;

  __device__ __forceinline__ RowSums() : max(-infinity(Acc())), sum(0), linear(0), mass(0) {}

  static __device__ __forceinline__ Acc reference(Acc max) {
    return max == -infinity(Acc()) ? Acc(0) : max;
  }

  __device__ __forceinline__ void rebase(Acc new_max) {
    const Acc to = reference(new_max);
    sum *= exp_for<T>(max - to);  // 0 for an empty part
    if constexpr (kLinear) linear -= mass * (to - reference(max));
    max = new_max;
  }

  // z[i] counts if present[i / kStep]. An absent z[i] is -inf. Labels do not use wq.
  template <int kCount, int kStep>
  __device__ __forceinline__ void add(const Acc (&z)[kCount], const Acc (&wq)[kCount],
                                      const bool (&present)[kCount / kStep]) {
    Acc new_max = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max = z[i] > new_max ? z[i] : new_max;
    rebase(new_max);
    const Acc to = reference(new_max);
    Acc part = 0, part_linear = 0, part_mass = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc distance = z[i] - to;
      part += exp_for<T>(distance);
      if constexpr (kLinear) {
        if (present[i / kStep]) {
          part_linear += wq[i] * distance;
          part_mass += wq[i];
        }
      }
    }
    sum += part;
    linear += part_linear;
    mass += part_mass;
  }

  __device__ __forceinline__ void merge(RowSums other) {
    const Acc new_max = max > other.max ? max : other.max;
    rebase(new_max);
    other.rebase(new_max);
    sum += other.sum;
    linear += other.linear;
    mass += other.mass;
  }

  // Every lane gets the sums of its warp. All lanes get the same bits.
  __device__ __forceinline__ void merge_warp() { merge_lanes(kWarpSize); }

  // The same for each group of `lanes` lanes, a power of two. All lanes of the warp must call.
  __device__ __forceinline__ void merge_lanes(int lanes) {
    rebase(greatest_of_lanes(max, lanes));
    add_lanes(lanes);
  }

  static __device__ __forceinline__ Acc greatest_of_lanes(Acc greatest, int lanes) {
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      const Acc other = __shfl_xor_sync(kFullMask, greatest, offset);
      greatest = other > greatest ? other : greatest;
    }
    return greatest;
  }

  // As merge_lanes(), if all lanes have the same maximum.
  __device__ __forceinline__ void add_lanes(int lanes) {
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, offset);
      if constexpr (kLinear) {
        linear += __shfl_xor_sync(kFullMask, linear, offset);
        mass += __shfl_xor_sync(kFullMask, mass, offset);
      }
    }
  }

  // Four numbers in memory that threads share.
  __device__ __forceinline__ void store(Acc* slot) const {
    slot[0] = max;
    slot[1] = sum;
    slot[2] = linear;
    slot[3] = mass;
  }
  __device__ __forceinline__ void load(const Acc* slot) {
    max = slot[0];
    sum = slot[1];
    linear = slot[2];
    mass = slot[3];
  }

  __device__ __forceinline__ RowSums from_lane(int offset) const {
    RowSums other;
    other.max = __shfl_xor_sync(kFullMask, max, offset);
    other.sum = __shfl_xor_sync(kFullMask, sum, offset);
    if constexpr (kLinear) {
      other.linear = __shfl_xor_sync(kFullMask, linear, offset);
      other.mass = __shfl_xor_sync(kFullMask, mass, offset);
    }
    return other;
  }
};

// A row's contribution to the reduced loss.
template <class Acc>
struct LossShare {
  Acc loss = 0, weight = 0;

  __device__ __forceinline__ void operator+=(const LossShare& other) {
    loss += other.loss;
    weight += other.weight;
  }
};

// Turns a row's sums into its saved numbers and its loss. `label_logit` is z at the label.
template <class T, TargetKind kKind>
__device__ __forceinline__ LossShare<Accum<T>> finish_row(const CrossEntropyParams& p,
                                                          const Smoothing<Accum<T>>& smoothing,
                                                          int64_t row, const Label& label,
                                                          Accum<T> label_logit,
                                                          RowSums<T, kKind> sums) {
  using Acc = Accum<T>;
  Acc* stats = static_cast<Acc*>(p.stats);
  const Acc log_sum = p.classes == 0 ? Acc(0) : log(sums.sum);
  LossShare<Acc> share;
  if constexpr (kKind == TargetKind::kProbabilities) {
    share.loss = sums.mass * log_sum - sums.linear;
    share.weight = p.classes == 0 ? Acc(0) : Acc(1);
  } else if (label.valid) {
    share.weight = class_weight<Acc>(p, label.value);
    share.loss = share.weight * (log_sum - (label_logit - sums.max));
    if constexpr (kKind == TargetKind::kSmoothedLabels) {
      share.loss = smoothing.keep * share.loss + (sums.mass * log_sum - sums.linear);
      sums.mass += smoothing.keep * share.weight;
    }
  } else {
    sums.mass = 0;
    if (!label.ignored) {
      report_error(p.error, row, label.value);
      // This makes the backward write NaN.
      share.loss = sums.max = quiet_nan(Acc());
    }
  }
  const Acc lse = sums.max + log_sum;
  if (p.z_loss != 0 && (kKind == TargetKind::kProbabilities || label.valid) && p.classes != 0) {
    share.loss += static_cast<Acc>(p.z_loss) * lse * lse;
  }
  if (p.lse != nullptr) static_cast<Acc*>(p.lse)[row] = lse;
  stats[row] = sums.max;
  stats[p.rows + row] = sums.sum;
  if constexpr (kKind != TargetKind::kLabels) stats[2 * p.rows + row] = sums.mass;
  if (p.reduction == LossReduction::kNone) write_either<T>(p.loss, p.loss_dtype, row, share.loss);
  return share;
}

// Writes the reduced loss and the divisor of a mean. One thread.
template <class T, class Sum>
__device__ __forceinline__ void write_reduced(const CrossEntropyParams& p, Sum loss, Sum weight) {
  if (p.reduction == LossReduction::kNone) {
    *static_cast<Accum<T>*>(p.total_weight) = 0;
    return;
  }
  Accum<T>* total = static_cast<Accum<T>*>(p.total_weight);
  if (p.reduction == LossReduction::kMean) loss /= p.counted ? static_cast<Sum>(*total) : weight;
  write_either<T>(p.loss, p.loss_dtype, 0, static_cast<Accum<T>>(loss));
  if (!p.counted) *total = static_cast<Accum<T>>(weight);
}

// Writes the summed share `index` of `count` to the partials, or finishes the loss. One thread.
template <class T>
__device__ __forceinline__ void finish_share(const CrossEntropyParams& p,
                                             const LossShare<Accum<T>>& share, int64_t index,
                                             int64_t count) {
  if (count == 1 || (p.reduction == LossReduction::kNone && index == 0)) {
    write_reduced<T>(p, share.loss, share.weight);
  } else if (p.reduction != LossReduction::kNone) {
    Accum<T>* partials = static_cast<Accum<T>*>(p.partials) + 2 * index;
    partials[0] = share.loss;
    partials[1] = share.weight;
  }
}

// The end of a forward block: adds its rows' shares in a fixed order, and writes partial `index` of
// `count` or finishes the loss. Every thread of the block must call. `shared` holds one number per
// warp.
template <class T>
__device__ __forceinline__ void finish_block(const CrossEntropyParams& p, LossShare<Accum<T>> share,
                                             Accum<T>* shared, int64_t index, int64_t count) {
  using Acc = Accum<T>;
  if (p.reduction != LossReduction::kNone) {
    share.loss = block_reduce(share.loss, Sum{}, Acc(0), shared);
    share.weight = block_reduce(share.weight, Sum{}, Acc(0), shared);
  }
  if (threadIdx.x == 0) finish_share<T>(p, share, index, count);
}

}  // namespace warpwright
