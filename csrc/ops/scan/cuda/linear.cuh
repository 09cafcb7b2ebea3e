// h_t = a_t h_{t-1} + b_t, of the inputs b and a.
#pragma once

#include <type_traits>

#include "ops/scan/cuda/operators.cuh"

namespace warpwright {

// The steps of a run in one: h after it = gate * (h before it) + value.
template <class Compute>
struct GatedRun {
  Compute gate, value;
};

template <class Compute>
__device__ __forceinline__ GatedRun<Compute> shuffle_up(GatedRun<Compute> run, int lanes) {
  return {shuffle_up(run.gate, lanes), shuffle_up(run.value, lanes)};
}
template <class Compute>
__device__ __forceinline__ GatedRun<Compute> shuffle(GatedRun<Compute> run, int lane) {
  return {shuffle(run.gate, lane), shuffle(run.value, lane)};
}

// A gate's rounding error reaches every step after it, and a product of gates has one rounding
// error per factor in every order. So gradients of long rows of floats are combined in double.
template <class T, class ComputeType = Accum<T>>
struct LinearScan {
  using Compute = ComputeType;
  static constexpr int kInputs = 2;
  static constexpr int kNumbers = 2;
  static constexpr int kWords = 2;
  static constexpr int kBlocksPerSm = sizeof(Compute) > sizeof(Accum<T>) ? 2 : 3;
  static constexpr bool kHasGates = true;
  static constexpr bool kHasLevels = false;
  using Element = GatedRun<Compute>;
  using Carry = double;

  __device__ static Compute read_identity(int input) { return input == 1 ? 1 : 0; }
  __device__ static Element identity() { return {1, 0}; }
  __device__ static Carry first_carry() { return 0; }
  __device__ static Element element(const Compute (&inputs)[2]) { return {inputs[1], inputs[0]}; }
  __device__ static Element combine(Element left, Element right) {
    return {left.gate * right.gate, right.gate * left.value + right.value};
  }
  __device__ static void total(Element run, Carry (&words)[2]) {
    words[0] = run.value;
    words[1] = run.gate;
  }
  __device__ static Carry empty_word(int word) { return word == 1 ? 1 : 0; }
  __device__ static void join(const Carry (&left)[2], Carry (&right)[2]) {
    right[0] += right[1] * left[0];
    right[1] *= left[1];
  }
  __device__ static Carry advance(Carry before, const Carry (&words)[2]) {
    return words[1] * before + words[0];
  }
  __device__ static Compute result(Compute before, Element run) {
    return run.gate * before + run.value;
  }
  __device__ static Compute result(Element run) { return run.value; }
  // The first run of a row, after the state before it.
  __device__ static Element start(Compute state, Element run) {
    return {run.gate, state == 0 ? run.value : run.gate * state + run.value};
  }
};

using PreciseScan = LinearScan<float, double>;

// The same with gates from levels. Differences of levels add up to one difference, so it is only
// the gates that must not be rounded to float.
template <class T>
using LevelCompute = std::conditional_t<sizeof(T) == 2, float, double>;
template <class T>
struct LevelScan : LinearScan<T, LevelCompute<T>> {
  static constexpr bool kHasLevels = true;
  static constexpr int kBlocksPerSm = 2;
  using Compute = LevelCompute<T>;

  __device__ static Compute gate(Compute before, Compute level) {
    const Compute difference = level - before;
    return level == before && difference != difference ? Compute(0) : exp(difference);
  }
};

}  // namespace warpwright
