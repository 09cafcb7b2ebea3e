// The operators of a reduction. An operator, for elements of type T, has
//   State        the partial result of a set of elements; identity() is that of the empty set
//   absorb       adds kCount elements to a State that has `before` elements already
//   merge        joins the States of two disjoint sets of elements
//   Merging      the operator for States of different threads
//   result       the output, from the State of all elements
// `Count` numbers elements: only moments need it.
#pragma once

#include <limits>
#include <type_traits>

#include "device/reduce.cuh"
#include "device/scaled_sum.cuh"
#include "device/types.cuh"

namespace warpwright {

// The result's parameters.
struct ReductionScale {
  double divisor;  // of a mean or a variance
  bool is_root;
};

// The values of a reduction are `value(0)` to `value(kCount - 1)`.
// Threads add in the accumulator's type; their sums are added in double.
template <class T, class Number = Accum<T>>
struct SumReduction {
  using Compute = Accum<T>;
  using State = Number;
  using Merging = SumReduction<T, double>;
  static constexpr bool kCounts = false;

  __device__ static State identity() { return 0; }
  template <int kCount, class F>
  __device__ static void absorb(State& state, Compute, const F& value) {
    state += tree_sum<kCount>(value);
  }
  __device__ static State merge(State a, Compute, State b, Compute) { return a + b; }
  __device__ static Number result(State state, const ReductionScale& scale) {
    return scale.divisor == 1 ? state : state / static_cast<Number>(scale.divisor);
  }
};

template <class T>
struct MaxReduction {
  using Merging = MaxReduction;
  using Compute = Accum<T>;
  using State = Compute;
  static constexpr bool kCounts = false;

  __device__ static State identity() { return -std::numeric_limits<Compute>::infinity(); }
  template <int kCount, class F>
  __device__ static void absorb(State& state, Compute, const F& value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) state = Max()(state, value(i));
  }
  __device__ static State merge(State a, Compute, State b, Compute) { return Max()(a, b); }
  __device__ static Compute result(State state, const ReductionScale&) { return state; }
};

template <class T>
struct LogSumExpReduction {
  using Merging = LogSumExpReduction;
  using Compute = Accum<T>;
  using State = ScaledSum<Compute>;
  static constexpr bool kCounts = false;

  __device__ static State identity() { return no_sum<Compute>(); }
  template <int kCount, class F>
  __device__ static void absorb(State& state, Compute, const F& value) {
    Compute reference = value(0);
#pragma unroll
    for (int i = 1; i < kCount; ++i) reference = larger_number(reference, value(i));
    reference = larger_number(state.reference, reference);  // also drops NaN
    reference = reference > kLargest<Compute> ? kLargest<Compute> : reference;
    const Compute sum =
        tree_sum<kCount>([&](int i) { return exp_of_difference(value(i) - reference); });
    state = {reference, state.sum * exp_of_difference(state.reference - reference) + sum};
  }
  __device__ static State merge(State a, Compute, State b, Compute) { return joined(a, b); }
  __device__ static Compute result(State state, const ReductionScale&) { return log_of(state); }
};

template <class Compute>
struct Moments {
  Compute mean, squares;  // of deviations from the mean
};

// Chan, Golub & LeVeque 1979, eq. 2.1: no cancellation, however far apart the means are.
template <class T>
struct VarReduction {
  using Merging = VarReduction;
  using Compute = Accum<T>;
  using State = Moments<Compute>;
  static constexpr bool kCounts = true;

  __device__ static State identity() { return {0, 0}; }
  template <int kCount, class F>
  __device__ static void absorb(State& state, Compute before, const F& value) {
    const Compute mean = tree_sum<kCount>(value) * (Compute{1} / kCount);
    const Compute squares = tree_sum<kCount>([&](int i) {
      const Compute d = value(i) - mean;
      return d * d;
    });
    state = merge(state, before, {mean, squares}, kCount);
  }
  __device__ static State merge(State a, Compute count_a, State b, Compute count_b) {
    const Compute share = count_b / (count_a + count_b);
    const Compute distance = b.mean - a.mean;
    // In this order an empty `a` adds 0, for any distance of the means.
    const State sum{a.mean + distance * share,
                    a.squares + b.squares + distance * count_a * share * distance};
    return count_b == 0 ? a : sum;
  }
  __device__ static Compute result(State state, const ReductionScale& scale) {
    const Compute variance = state.squares / static_cast<Compute>(scale.divisor);
    return scale.is_root ? sqrt(variance) : variance;
  }
};

// ---- what threads exchange ----

template <class State>
__device__ __forceinline__ State shuffle_down(State value, int lanes) {
  if constexpr (std::is_arithmetic_v<State>) {
    return __shfl_down_sync(kFullMask, value, lanes);
  } else {
    const auto& [a, b] = value;
    return {__shfl_down_sync(kFullMask, a, lanes), __shfl_down_sync(kFullMask, b, lanes)};
  }
}

// A State and how many elements it stands for.
template <class Op>
struct Part {
  using Operator = Op;
  typename Op::State state = Op::identity();
  typename Op::Compute count = 0;

  // What threads exchange.
  __device__ __forceinline__ Part<typename Op::Merging> for_merging() const {
    return {state, count};
  }

  template <int kCount, class F>
  __device__ __forceinline__ void absorb(const F& value) {
    Op::template absorb<kCount>(state, count, value);
    if constexpr (Op::kCounts) count += kCount;
  }
  __device__ __forceinline__ void merge(const Part& right) {
    state = Op::merge(state, count, right.state, right.count);
    if constexpr (Op::kCounts) count += right.count;
  }
  __device__ __forceinline__ Part from_lane_below(int lanes) const {
    Part result;
    result.state = shuffle_down(state, lanes);
    if constexpr (Op::kCounts) result.count = __shfl_down_sync(kFullMask, count, lanes);
    return result;
  }
};

// A part in the workspace: as many numbers as reduction_state_bytes() says.
template <class Op>
struct StoredPart {
  using State = typename Op::State;
  using Number = std::conditional_t<std::is_arithmetic_v<State>, State, typename Op::Compute>;
  static constexpr int kNumbers =
      static_cast<int>(sizeof(State) / sizeof(Number)) + (Op::kCounts ? 1 : 0);

  __device__ static void store(void* parts, int64_t index, const Part<Op>& part) {
    auto* target = static_cast<Number*>(parts);
    if constexpr (std::is_arithmetic_v<typename Op::State>) {
      target[index] = part.state;
    } else {
      const auto& [a, b] = part.state;
      target[index * kNumbers] = a;
      target[index * kNumbers + 1] = b;
    }
    if constexpr (Op::kCounts) target[index * kNumbers + kNumbers - 1] = part.count;
  }
  __device__ static Part<Op> load(const void* parts, int64_t index) {
    const auto* source = static_cast<const Number*>(parts);
    Part<Op> part;
    if constexpr (std::is_arithmetic_v<typename Op::State>) {
      part.state = __ldcg(source + index);
    } else {
      part.state = {__ldcg(source + index * kNumbers), __ldcg(source + index * kNumbers + 1)};
    }
    if constexpr (Op::kCounts) part.count = __ldcg(source + index * kNumbers + kNumbers - 1);
    return part;
  }
};

}  // namespace warpwright
