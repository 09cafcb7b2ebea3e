// y_t = log(exp(y_{t-1}) + exp(x_t))
#pragma once

#include "device/scaled_sum.cuh"
#include "ops/scan/cuda/operators.cuh"

namespace warpwright {

template <class Compute>
__device__ __forceinline__ ScaledSum<Compute> shuffle_up(ScaledSum<Compute> run, int lanes) {
  return {shuffle_up(run.reference, lanes), shuffle_up(run.sum, lanes)};
}
template <class Compute>
__device__ __forceinline__ ScaledSum<Compute> shuffle(ScaledSum<Compute> run, int lane) {
  return {shuffle(run.reference, lane), shuffle(run.sum, lane)};
}

// Carries are logarithms.
template <class T>
struct LogSumExpScan {
  static constexpr int kInputs = 1;
  static constexpr int kNumbers = 2;
  static constexpr int kWords = 1;
  static constexpr int kBlocksPerSm = 3;
  static constexpr bool kHasGates = false;
  static constexpr bool kHasLevels = false;
  using Compute = Accum<T>;
  using Element = ScaledSum<Compute>;
  using Carry = double;

  __device__ static Compute read_identity(int) { return -std::numeric_limits<Compute>::infinity(); }
  __device__ static Element identity() { return no_sum<Compute>(); }
  __device__ static Carry first_carry() { return empty_word(0); }
  __device__ static Element element(const Compute (&inputs)[1]) { return scaled(inputs[0]); }
  __device__ static Element combine(Element left, Element right) { return joined(left, right); }
  __device__ static void total(Element run, Carry (&words)[1]) {
    words[0] = run.reference + log(static_cast<double>(run.sum));
  }
  __device__ static Carry empty_word(int) { return -std::numeric_limits<double>::infinity(); }
  __device__ static void join(const Carry (&left)[1], Carry (&right)[1]) {
    right[0] = advance(left[0], right);
  }
  __device__ static Carry advance(Carry before, const Carry (&words)[1]) {
    return log_of(joined(scaled(before), scaled(words[0])));
  }
  __device__ static Compute result(Compute before, Element run) {
    return log_of(joined(scaled(before), run));
  }
  __device__ static Compute result(Element run) { return log_of(run); }
};

}  // namespace warpwright
