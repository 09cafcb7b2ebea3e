// What a scan combines. An operator has
//   kInputs      input tensors; read_identity(i): what input i reads as outside of the tensor
//   kHasGates    input 1 has gates, which may be shifted, and rows may have an initial state
//   kHasLevels   input 1 has levels: gate(before, level) is the gate between two of them
//   Element      a run of steps, as the tile combines them: identity(), combine(left, right)
//   kNumbers     of an Element, as ScanParams::numbers()
//   kBlocksPerSm of 256 threads, in columns and long rows: as many as its registers allow
//   Carry        8 bytes that pass from tile to tile; of a wider type than Element's if that keeps
//                digits
//   kWords       Carry words of a tile's total: total(element, words) makes them, join(left, right)
//                combines them
//   advance      the carry after a tile, from the carry before it: the one fold between tiles
//   result       the output of a run that starts with the tile, from the carry before the tile
#pragma once

#include <type_traits>

#include "device/forget.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace warpwright {

// Floats are summed in float within a tile, and carried in double: the error of a long row is then
// that of one tile. Integers are unsigned, because their sums may wrap, as native's do.
template <class T>
struct ScanTypes {
  using Compute = Accum<T>;
  using Carry = double;
};
template <>
struct ScanTypes<int64_t> {
  using Compute = uint64_t;
  using Carry = uint64_t;
};
template <class T>
using ScanCompute = typename ScanTypes<T>::Compute;

template <class Compute, class T, int kSize>
__device__ __forceinline__ Vec<Compute, kSize> widen_for_scan(const Vec<T, kSize>& x) {
  if constexpr (sizeof(T) == 2) {
    return widen(x);
  } else {
    Vec<Compute, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) result[j] = static_cast<Compute>(x[j]);
    return result;
  }
}

// y_t = y_{t-1} + x_t
template <class T>
struct SumScan {
  static constexpr int kInputs = 1;
  static constexpr int kNumbers = 1;
  static constexpr int kWords = 1;
  static constexpr int kBlocksPerSm = 3;
  static constexpr bool kHasGates = false;
  static constexpr bool kHasLevels = false;
  using Compute = ScanCompute<T>;
  using Element = Compute;
  using Carry = typename ScanTypes<T>::Carry;

  __device__ static Compute read_identity(int) { return 0; }
  __device__ static Element identity() { return 0; }
  __device__ static Carry first_carry() { return 0; }
  __device__ static Element element(const Compute (&inputs)[1]) { return inputs[0]; }
  __device__ static Element combine(Element left, Element right) { return left + right; }
  __device__ static void total(Element run, Carry (&words)[1]) { words[0] = run; }
  __device__ static Carry empty_word(int) { return 0; }
  __device__ static void join(const Carry (&left)[1], Carry (&right)[1]) { right[0] += left[0]; }
  __device__ static Carry advance(Carry before, const Carry (&words)[1]) {
    return before + words[0];
  }
  __device__ static Compute result(Compute before, Element run) { return before + run; }
  __device__ static Compute result(Element run) { return run; }
};

// Products have one rounding error per factor in every order, so floats are multiplied in double.
template <class T>
using ProductCompute = std::conditional_t<std::is_same_v<T, float>, double, ScanCompute<T>>;

// y_t = y_{t-1} * x_t
template <class T>
struct ProductScan {
  static constexpr int kInputs = 1;
  static constexpr int kNumbers = std::is_same_v<T, float> ? 2 : 1;
  static constexpr int kWords = 1;
  static constexpr int kBlocksPerSm = 3;
  static constexpr bool kHasGates = false;
  static constexpr bool kHasLevels = false;
  using Compute = ProductCompute<T>;
  using Element = Compute;
  using Carry = typename ScanTypes<T>::Carry;

  __device__ static Compute read_identity(int) { return 1; }
  __device__ static Element identity() { return 1; }
  __device__ static Carry first_carry() { return 1; }
  __device__ static Element element(const Compute (&inputs)[1]) { return inputs[0]; }
  __device__ static Element combine(Element left, Element right) { return left * right; }
  __device__ static void total(Element run, Carry (&words)[1]) { words[0] = run; }
  __device__ static Carry empty_word(int) { return 1; }
  __device__ static void join(const Carry (&left)[1], Carry (&right)[1]) { right[0] *= left[0]; }
  __device__ static Carry advance(Carry before, const Carry (&words)[1]) {
    return before * words[0];
  }
  __device__ static Compute result(Compute before, Element run) { return before * run; }
  __device__ static Compute result(Element run) { return run; }
};

template <class Element>
__device__ __forceinline__ Element shuffle_up(Element value, int lanes) {
  return __shfl_up_sync(kFullMask, value, lanes);
}
template <class Element>
__device__ __forceinline__ Element shuffle(Element value, int lane) {
  return __shfl_sync(kFullMask, value, lane);
}

}  // namespace warpwright
