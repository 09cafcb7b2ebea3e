// Warp and block reductions with a fixed order, so that the same input gives the same bits.
#pragma once

#include <cstdint>

namespace warpwright {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Keeps NaN: a maximum that drops it hides a broken model.
struct Max {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return (a > b || a != a) ? a : b;
  }
};

// The sum of kCount values from value(kFirst) on, kCount a power of two, as a tree: this gives the
// shortest chains of roundings.
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ auto tree_sum(const F& value) {
  if constexpr (kCount == 1) {
    return value(kFirst);
  } else {
    return tree_sum<kCount / 2, kFirst>(value) + tree_sum<kCount / 2, kFirst + kCount / 2>(value);
  }
}

// All kWidth lanes of an aligned group get the result. All 32 lanes of the warp must call it.
template <int kWidth = kWarpSize, class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullMask, value, offset, kWidth));
  }
  return value;
}

// Every thread gets the result. `shared` holds one T per warp; all threads of the block must call,
// and the block size is a multiple of 32. The leading barrier lets `shared` be reused at once.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T value, Op op, T identity, T* shared) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  value = warp_reduce(value, op);
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < num_warps ? shared[lane] : identity;
  return warp_reduce(value, op);
}

}  // namespace warpwright
