// What the softmax rungs share: a block of 1024 threads per row, and how a thread walks over it.
#pragma once

#include <cmath>

#include "ladder.cuh"

namespace ladder {

constexpr int kRowThreads = 1024;
constexpr int kRowWarps = kRowThreads / warpwright::kWarpSize;
constexpr int kVec = 4;  // floats per access
using Vec4 = warpwright::Vec<float, kVec>;

// Calls f(v, the v-th vector of the row) for each of this thread's vectors, a few loads ahead.
template <class F>
__device__ __forceinline__ void for_vectors(const float* row, int cols, const F& f) {
#pragma unroll 4
  for (int v = threadIdx.x; v < cols / kVec; v += kRowThreads) {
    f(v, warpwright::load_vec<kVec>(row + int64_t{v} * kVec));
  }
}

__device__ __forceinline__ float max_of(Vec4 x) {
  return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}

__device__ __forceinline__ Vec4 exps(Vec4 x, float shift) {
  Vec4 y;
#pragma unroll
  for (int i = 0; i < kVec; ++i) y[i] = expf(x[i] - shift);
  return y;
}

__device__ __forceinline__ float sum_of(Vec4 x) { return (x[0] + x[1]) + (x[2] + x[3]); }

__device__ __forceinline__ Vec4 times(Vec4 x, float factor) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] *= factor;
  return x;
}

}  // namespace ladder
