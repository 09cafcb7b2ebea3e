// Shared by the cross-entropy kernels: the target of a row, the online sums, and gradients.
#pragma once

#include "device/error_word.cuh"
#include "device/exp.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/cross_entropy/cross_entropy.h"

namespace warpwright {

// Factors of the smoothed target q = keep * target + spread, computed on the host: no division in a
// thread.
template <class Acc>
struct Smoothing {
  Acc keep;    // 1 - s
  Acc spread;  // s / C

  explicit Smoothing(const CrossEntropyProblem& p)
      : keep(static_cast<Acc>(1 - p.label_smoothing)),
        spread(p.label_smoothing == 0 ? Acc(0) : static_cast<Acc>(p.label_smoothing / p.classes)) {}
};

// Accesses in flight per thread: as many as fit the registers of 1024 threads per SM (float64: 512)
// without spilling.
template <class T, TargetKind kKind, int kVec>
constexpr int kCrossEntropyUnroll = [] {
  const int elements = kKind != TargetKind::kLabels ? 4 : 32 / static_cast<int>(sizeof(T));
  return kVec >= elements ? 1 : elements / kVec < 8 ? elements / kVec : 8;
}();
// Minimum blocks of kMaxCrossEntropyThreads per SM.
template <class T>
constexpr int kCrossEntropyBlocks = sizeof(T) == 8 ? 1 : 2;

__device__ __forceinline__ float infinity(float) { return __int_as_float(0x7f800000); }
__device__ __forceinline__ double infinity(double) {
  return __longlong_as_double(0x7ff0000000000000ll);
}
__device__ __forceinline__ float quiet_nan(float) { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ double quiet_nan(double) {
  return __longlong_as_double(0x7fffffffffffffffll);
}

// Loads kCount contiguous elements and converts them, in 16-byte accesses if they fill one.
template <int kCount, class T>
__device__ __forceinline__ void load_converted(const T* source, Accum<T> (&out)[kCount]) {
  constexpr int kStep = kCount < kVecSize<T> ? kCount : kVecSize<T>;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const Vec<T, kStep> loaded = load_vec<kStep>(source + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) out[i + j] = convert<Accum<T>>(loaded[j]);
  }
}

template <int kCount, class T, class Acc>
__device__ __forceinline__ void store_converted(T* destination, const Acc (&values)[kCount]) {
  constexpr int kStep = kCount < kVecSize<T> ? kCount : kVecSize<T>;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    Vec<T, kStep> stored;
#pragma unroll
    for (int j = 0; j < kStep; ++j) stored[j] = convert<T>(values[i + j]);
    store_vec(destination + i, stored);
  }
}

constexpr int kLineBytes = 128;

// How many elements of a row come before its first multiple of `bytes`, a power of two.
template <class T>
__device__ __forceinline__ int scalar_head(const T* row, int64_t classes, int bytes) {
  const int head = static_cast<int>(-reinterpret_cast<uintptr_t>(row) & (bytes - 1)) /
                   static_cast<int>(sizeof(T));
  return head < classes ? head : static_cast<int>(classes);
}

// ---- targets ----

struct Label {
  int64_t value;
  bool ignored;
  bool valid;  // a class; if neither is set, the label is bad
};

__device__ __forceinline__ int64_t load_label_value(const CrossEntropyProblem& p, int64_t row) {
  return p.target_dtype == DType::kUInt8
             ? static_cast<int64_t>(static_cast<const uint8_t*>(p.target)[row])
             : static_cast<const int64_t*>(p.target)[row];
}

// Tests the range in 64 bits. A bad label is never used as an address.
__device__ __forceinline__ Label label_of(const CrossEntropyProblem& p, int64_t value) {
  const bool ignored = value == p.ignore_index;
  return {value, ignored, !ignored && value >= 0 && value < p.classes};
}

__device__ __forceinline__ Label load_label(const CrossEntropyProblem& p, int64_t row) {
  return label_of(p, load_label_value(p, row));
}

template <class Acc>
__device__ __forceinline__ Acc class_weight(const CrossEntropyProblem& p, int64_t c) {
  return p.weight == nullptr ? Acc(1) : static_cast<const Acc*>(p.weight)[c];
}

// Loads a number whose type, T or Accum<T>, is known at run time.
template <class T>
__device__ __forceinline__ Accum<T> read_either(const void* data, DType type, int64_t i) {
  constexpr bool kLow = sizeof(T) == 2;
  if (!kLow || type == DType::kFloat32) return static_cast<const Accum<T>*>(data)[i];
  return convert<Accum<T>>(static_cast<const T*>(data)[i]);
}
template <class T>
__device__ __forceinline__ void write_either(void* data, DType type, int64_t i, Accum<T> value) {
  constexpr bool kLow = sizeof(T) == 2;
  if (!kLow || type == DType::kFloat32) {
    static_cast<Accum<T>*>(data)[i] = value;
  } else {
    static_cast<T*>(data)[i] = convert<T>(value);
  }
}

// ---- forward ----

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
  if (p.reduction == Reduction::kNone) write_either<T>(p.loss, p.loss_dtype, row, share.loss);
  return share;
}

// Writes the reduced loss and the divisor of a mean. One thread.
template <class T, class Sum>
__device__ __forceinline__ void write_reduced(const CrossEntropyParams& p, Sum loss, Sum weight) {
  if (p.reduction == Reduction::kNone) {
    *static_cast<Accum<T>*>(p.total_weight) = 0;
    return;
  }
  Accum<T>* total = static_cast<Accum<T>*>(p.total_weight);
  if (p.reduction == Reduction::kMean) loss /= p.counted ? static_cast<Sum>(*total) : weight;
  write_either<T>(p.loss, p.loss_dtype, 0, static_cast<Accum<T>>(loss));
  if (!p.counted) *total = static_cast<Accum<T>>(weight);
}

// Writes the summed share `index` of `count` to the partials, or finishes the loss. One thread.
template <class T>
__device__ __forceinline__ void finish_share(const CrossEntropyParams& p,
                                             const LossShare<Accum<T>>& share, int64_t index,
                                             int64_t count) {
  if (count == 1 || (p.reduction == Reduction::kNone && index == 0)) {
    write_reduced<T>(p, share.loss, share.weight);
  } else if (p.reduction != Reduction::kNone) {
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
  if (p.reduction != Reduction::kNone) {
    share.loss = block_reduce(share.loss, Sum{}, Acc(0), shared);
    share.weight = block_reduce(share.weight, Sum{}, Acc(0), shared);
  }
  if (threadIdx.x == 0) finish_share<T>(p, share, index, count);
}

// Adds `count` partials: the second launch of a reduced forward.
void launch_cross_entropy_reduce(const CrossEntropyParams& p, int64_t count, cudaStream_t stream);

// The persistent kernels; the forward without the reduction's launch.
void launch_cross_entropy_fwd_persistent(const CrossEntropyParams& p,
                                         const CrossEntropyConfig& config, cudaStream_t stream);

void launch_cross_entropy_bwd_persistent(const CrossEntropyBackwardParams& p,
                                         const CrossEntropyConfig& config, cudaStream_t stream);

// The kernels for strided classes.
void launch_cross_entropy_fwd_pixels(const CrossEntropyParams& p, const CrossEntropyConfig& config,
                                     cudaStream_t stream);
void launch_cross_entropy_bwd_pixels(const CrossEntropyBackwardParams& p,
                                     const CrossEntropyConfig& config, cudaStream_t stream);

// ---- backward ----

// A row's gradient: grad_input = g (M p - w q) and grad_target = -g (1 - s) w log p, with p = exp(z
// - max) / sum and M = W + 2 z_loss lse. The difference comes first, so that it is exactly 0 where
// it should be.
template <class T, TargetKind kKind>
struct RowGradient {
  using Acc = Accum<T>;
  Acc max, sum;
  Acc grad;         // g; 0 for an ignored row
  Acc mass;         // M
  Acc mass_by_sum;  // M / sum
  int64_t label = -1;
  bool zero = false;  // the whole row is 0 for any logits: they need not be read

  // From the numbers that a forward saved.
  template <class Params>
  __device__ __forceinline__ RowGradient(const Params& p, int64_t row) {
    const Acc* stats = static_cast<const Acc*>(p.stats);
    Acc g = 1;
    if (p.grad_output != nullptr) {
      g = read_either<T>(p.grad_output, p.loss_dtype,
                         p.reduction == Reduction::kNone ? row : int64_t{0});
    }
    if (p.reduction == Reduction::kMean) g /= *static_cast<const Acc*>(p.total_weight);
    Label target{-1, false, false};
    if constexpr (kKind != TargetKind::kProbabilities) target = load_label(p, row);
    const Acc saved_mass = kKind == TargetKind::kLabels ? Acc(0) : stats[2 * p.rows + row];
    set(p, target, stats[row], stats[p.rows + row], saved_mass, g);
  }

  // `row_mass` is W, unless q is one-hot.
  __device__ __forceinline__ RowGradient(const CrossEntropyProblem& p, const Label& target,
                                         Acc row_max, Acc row_sum, Acc row_mass, Acc g) {
    set(p, target, row_max, row_sum, row_mass, g);
  }

  __device__ __forceinline__ void set(const CrossEntropyProblem& p, const Label& target,
                                      Acc row_max, Acc row_sum, Acc row_mass, Acc g) {
    max = row_max;
    sum = row_sum;
    grad = g;
    if constexpr (kKind == TargetKind::kProbabilities) {
      mass = row_mass;
    } else {
      mass = 0;
      if (target.valid) {
        label = target.value;
        mass = kKind == TargetKind::kLabels ? class_weight<Acc>(p, label) : row_mass;
      } else if (target.ignored) {
        grad = 0;
        // NaN and infinities of an ignored row propagate, as in native's 0 * NaN.
        zero = max - max == 0 && sum - sum == 0;
        if (zero) max = 0;
      } else {
        grad = quiet_nan(Acc());
      }
    }
    if (p.z_loss != 0 && (kKind == TargetKind::kProbabilities || label >= 0)) {
      mass += Acc(2) * static_cast<Acc>(p.z_loss) * (max + log(sum));
    }
    mass_by_sum = mass / sum;
  }

  // The gradient of lane `from` in each group of `lanes` lanes. All lanes of the warp must call.
  __device__ __forceinline__ RowGradient of_lane(int from, int lanes) const {
    RowGradient other = *this;
    other.max = __shfl_sync(kFullMask, max, from, lanes);
    other.sum = __shfl_sync(kFullMask, sum, from, lanes);
    other.grad = __shfl_sync(kFullMask, grad, from, lanes);
    other.mass_by_sum = __shfl_sync(kFullMask, mass_by_sum, from, lanes);
    other.label = __shfl_sync(kFullMask, label, from, lanes);
    other.zero = __shfl_sync(kFullMask, static_cast<int>(zero), from, lanes) != 0;
    return other;
  }

  __device__ __forceinline__ Acc distance(Acc z) const { return z - max; }
  __device__ __forceinline__ Acc operator()(Acc distance, Acc wq) const {
    return grad * (mass_by_sum * exp_for<T>(distance) - wq);
  }
  // The same for a one-hot q of another class: all of them have one factor.
  __device__ __forceinline__ Acc of_no_label(Acc distance) const {
    return grad * mass_by_sum * exp_for<T>(distance);
  }
  // The label's own logit.
  __device__ __forceinline__ Acc at_label(Acc z, Acc w, const Smoothing<Acc>& smoothing) const {
    return (*this)(distance(z),
                   kKind == TargetKind::kLabels ? w : (smoothing.spread + smoothing.keep) * w);
  }
};

// w q of class c, without the label's own share. `target` is the probability.
template <TargetKind kKind, class Acc>
__device__ __forceinline__ Acc weighted_target(const CrossEntropyProblem& p,
                                               const Smoothing<Acc>& smoothing, int64_t c,
                                               Acc target) {
  if constexpr (kKind == TargetKind::kLabels) {
    return Acc(0);
  } else {
    const Acc q = kKind == TargetKind::kProbabilities ? smoothing.spread + smoothing.keep * target
                                                      : smoothing.spread;
    return q * class_weight<Acc>(p, c);
  }
}

// One vector of a row: gradients of kVec classes from `c` on.
template <class T, class Q, TargetKind kKind, int kVec>
__device__ __forceinline__ void write_gradients(const CrossEntropyProblem& p,
                                                const Smoothing<Accum<T>>& smoothing,
                                                const RowGradient<T, kKind>& gradient, int64_t c,
                                                const Vec<T, kVec>& z, const Q* q, T* dz, Q* dq) {
  using Acc = Accum<T>;
  Acc distance[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) distance[j] = gradient.distance(convert<Acc>(z[j]));
  if (dz != nullptr) {
    Acc target[kVec] = {};
    if constexpr (kKind == TargetKind::kProbabilities) load_converted<kVec>(q + c, target);
    Acc result[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result[j] = gradient(distance[j], weighted_target<kKind>(p, smoothing, c + j, target[j]));
    }
    if constexpr (kKind != TargetKind::kProbabilities) {
      const int64_t hit = gradient.label - c;
      if (hit >= 0 && hit < kVec) {
        const Acc w = class_weight<Acc>(p, gradient.label);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (hit == j) result[j] = gradient.at_label(convert<Acc>(z[j]), w, smoothing);
        }
      }
    }
    store_converted<kVec>(dz + c, result);
  }
  if constexpr (kKind == TargetKind::kProbabilities) {
    if (dq != nullptr) {
      const Acc log_sum = log(gradient.sum);
      Acc result[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        result[j] =
            -gradient.grad * smoothing.keep * class_weight<Acc>(p, c + j) * (distance[j] - log_sum);
      }
      store_converted<kVec>(dq + c, result);
    }
  }
}

// Calls f<T, Q, kKind>() for the problem's types. Q is the type of probabilities.
template <class F>
void for_cross_entropy(const CrossEntropyProblem& p, F&& f) {
  for_dtype(p.dtype, [&]<class T>() { for_target<T, Accum<T>>(p, f); });
}

}  // namespace warpwright
