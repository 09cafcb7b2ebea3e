// Rows, or parts of rows, in shared memory: which part a block holds, and its sums.
#pragma once

#include "ops/cross_entropy/cuda/row_sums.cuh"

namespace warpwright {

// Vectors of a row. The first vector of the row starts at class `head`.
struct VectorRange {
  int head;
  int first, last;
};

// The part of a row that block `rank` holds: the rank-th `share` of the row's vectors. The first
// block also holds the scalars before the first boundary and after the last vector. Offsets in a
// row in shared memory fit 32 bits.
template <int kVec>
struct RowPart : VectorRange {
  int vectors;  // of the whole row
  int scalars;  // of this block

  template <class T>
  __device__ __forceinline__ RowPart(const T* z, int classes, int rank, int share,
                                     int boundary = kVecBytes)
      : VectorRange{0, 0, 0} {
    if constexpr (kVec > 1) head = scalar_head(z, classes, boundary);
    vectors = (classes - head) / kVec;
    first = rank * share < vectors ? rank * share : vectors;
    last = first + share < vectors ? first + share : vectors;
    scalars = rank == 0 ? classes - vectors * kVec : 0;
  }
  __device__ __forceinline__ int scalar_class(int i) const {
    return i < head ? i : i + vectors * kVec;
  }
};

// A thread's vectors of a part, in shared memory: every `lanes`-th from the part's `lane`-th on, in
// copy[0], copy[pitch], and so on.
template <class T, int kVec>
struct HeldVectors {
  const Vec<T, kVec>* copy;
  int pitch, lane, lanes;
};

// Loads a vector in one access. If the code uses the elements in pairs, the compiler would load a
// Vec in pairs.
template <class T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load_whole(const Vec<T, kVec>* pointer) {
  if constexpr (sizeof(*pointer) == sizeof(uint4)) {
    const uint4 raw = *reinterpret_cast<const uint4*>(pointer);
    return *reinterpret_cast<const Vec<T, kVec>*>(&raw);
  } else {
    return *pointer;
  }
}

// Sums a power of two of numbers, in place.
template <class Acc, int kCount>
__device__ __forceinline__ Acc sum_by_halves(Acc (&parts)[kCount]) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) parts[j] += parts[j + half];
  }
  return parts[0];
}

// Element by element, the greater one; NaN does not count. Pairs of 16-bit elements are compared
// packed.
template <class T, int kVec>
__device__ __forceinline__ void keep_greater(Vec<T, kVec>& most, const Vec<T, kVec>& x) {
  if constexpr (sizeof(T) == 2 && kVec % 2 == 0) {
    using Pair = std::conditional_t<std::is_same_v<T, half>, __half2, __nv_bfloat162>;
    auto* pairs = reinterpret_cast<Pair*>(&most);
#pragma unroll
    for (int j = 0; j < kVec / 2; ++j) {
      pairs[j] = __hmax2(pairs[j], reinterpret_cast<const Pair*>(&x)[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      most[j] = convert<T>(fmax(convert<Accum<T>>(most[j]), convert<Accum<T>>(x[j])));
    }
  }
}

// The sums of a thread's vectors. The maximum comes first, so that no exponential is computed
// twice.
template <class T, TargetKind kKind, int kVec>
__device__ __forceinline__ RowSums<T, kKind> sum_vectors(const CrossEntropyProblem& p,
                                                         const Smoothing<Accum<T>>& smoothing,
                                                         const VectorRange& part,
                                                         const HeldVectors<T, kVec>& held) {
  using Acc = Accum<T>;
  using Sums = RowSums<T, kKind>;
  Sums sums;
  Vec<T, kVec> most;
#pragma unroll
  for (int j = 0; j < kVec; ++j) most[j] = convert<T>(sums.max);
  const Vec<T, kVec>* copy = held.copy;
#pragma unroll 4
  for (int at = part.first + held.lane; at < part.last; at += held.lanes, copy += held.pitch) {
    keep_greater(most, load_whole(copy));
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) sums.max = fmax(sums.max, convert<Acc>(most[j]));

  const Acc to = Sums::reference(sums.max);
  copy = held.copy;
#pragma unroll 2
  for (int at = part.first + held.lane; at < part.last; at += held.lanes, copy += held.pitch) {
    const Vec<Acc, kVec> z = widen(load_whole(copy));
    Acc parts[kVec];
    Acc linear = 0, mass = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const Acc distance = z[j] - to;
      parts[j] = exp_for<T>(distance);
      if constexpr (Sums::kLinear) {
        const Acc wq = weighted_target<kKind>(p, smoothing, part.head + at * kVec + j, Acc(0));
        linear += wq * distance;
        mass += wq;
      }
    }
    sums.sum += sum_by_halves(parts);
    sums.linear += linear;
    sums.mass += mass;
  }
  return sums;
}

template <class T, TargetKind kKind>
__device__ __forceinline__ void add_scalar(const CrossEntropyProblem& p,
                                           const Smoothing<Accum<T>>& smoothing, int c, T z,
                                           RowSums<T, kKind>& sums) {
  const Accum<T> value[1] = {convert<Accum<T>>(z)};
  const Accum<T> wq[1] = {weighted_target<kKind>(p, smoothing, c, Accum<T>(0))};
  const bool present[1] = {true};
  sums.template add<1, 1>(value, wq, present);
}

}  // namespace warpwright
