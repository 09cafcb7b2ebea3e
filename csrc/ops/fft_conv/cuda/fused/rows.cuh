// Transforms of complex rows in shared memory by all threads of a block.
//
// A stage of radix r splits blocks of m points, in place: butterfly t of a block reads and writes
// the points t + j m/r (decimation in frequency). The spectrum therefore ends in reversed digits.
// The inverse runs the stages backwards, so nothing is ever reordered; the kernel's spectrum has
// the same order. kPoints = q 16^s: first radix q from memory, then radix 16, and the last radix,
// the product and the first inverse radix in registers.
#pragma once

#include "ops/fft_conv/cuda/fused/dft.cuh"

namespace warpwright::fft {

template <int kPoints_, int kThreads_>
struct RowPlan {
  static constexpr int kPoints = kPoints_;
  static constexpr int kThreads = kThreads_;
  static constexpr int first_radix() {
    int rest = kPoints;
    while (rest > 16) rest /= 16;
    return rest;
  }
  static constexpr int kRadix = first_radix();
  static constexpr int kRows =
      kPoints < 4096 ? 4096 / kPoints : 1;  // that a block transforms at once
  static constexpr int kPitch = kPoints + kPoints / 16;
  static constexpr int kElements = kRows * kPitch;
};

// A point's place in a row: radix-16 butterflies of neighbouring points then hit all banks.
__host__ __device__ constexpr int place(int point) { return point + point / 16; }

// The distance of the points `kStride` apart. The points of one block of 16 are neighbours.
template <int kStride>
constexpr int kDistance = kStride >= 16 ? kStride + kStride / 16 : kStride;

template <int kRadix, int kStride>
__device__ __forceinline__ void load_points(float2 (&v)[kRadix], const float2* row, int point) {
  const float2* from = row + place(point);
#pragma unroll
  for (int j = 0; j < kRadix; ++j) v[j] = from[j * kDistance<kStride>];
}

template <int kRadix, int kStride>
__device__ __forceinline__ void store_points(const float2 (&v)[kRadix], float2* row, int point) {
  float2* to = row + place(point);
#pragma unroll
  for (int j = 0; j < kRadix; ++j) to[j * kDistance<kStride>] = v[j];
}

// Calls f(row, i) for i < kPerRow of each row of the block.
template <class Plan, int kPerRow, class F>
__device__ __forceinline__ void for_each_butterfly(F&& f) {
  constexpr int kAll = Plan::kRows * kPerRow;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kAll; i += Plan::kThreads) {
    f(i / kPerRow, i % kPerRow);
  }
}

// The stages of radix 16 on blocks of kBlock points and smaller ones, without the last.
template <class Plan, int kBlock, bool kInverse, class Roots>
__device__ __forceinline__ void middle_stages(float2* rows, const Roots& root) {
  if constexpr (kBlock > 16) {
    constexpr int kStride = kBlock / 16;
    if constexpr (kInverse) middle_stages<Plan, kStride, true>(rows, root);
    for_each_butterfly<Plan, Plan::kPoints / 16>([&](int row, int i) {
      float2* const points = rows + row * Plan::kPitch;
      const int t = i % kStride, point = i / kStride * kBlock + t;
      float2 v[16];
      load_points<16, kStride>(v, points, point);
      if constexpr (kInverse) {
        twiddle<true>(v, root, t * (Plan::kPoints / kBlock));
        inverse_dft(v);
      } else {
        dft(v);
        twiddle<false>(v, root, t * (Plan::kPoints / kBlock));
      }
      store_points<16, kStride>(v, points, point);
    });
    __syncthreads();
    if constexpr (!kInverse) middle_stages<Plan, kStride, false>(rows, root);
  }
}

// The first stage; `load(row, point)` has the values.
template <class Plan, class Roots, class Load>
__device__ __forceinline__ void first_stage(float2* rows, const Roots& root, Load&& load) {
  constexpr int kStride = Plan::kPoints / Plan::kRadix;
  for_each_butterfly<Plan, kStride>([&](int row, int t) {
    float2 v[Plan::kRadix];
    load(row, t, v);
    dft(v);
    twiddle<false>(v, root, t);
    store_points<Plan::kRadix, kStride>(v, rows + row * Plan::kPitch, t);
  });
  __syncthreads();
}

// The last stage of the forward transform: f(row, block, v) gets 16 points of the spectrum.
template <class Plan, class F>
__device__ __forceinline__ void last_stage(float2* rows, F&& f) {
  for_each_butterfly<Plan, Plan::kPoints / 16>([&](int row, int block) {
    float2* const points = rows + row * Plan::kPitch;
    float2 v[16];
    load_points<16, 1>(v, points, 16 * block);
    dft(v);
    f(points, block, v);
  });
}

// Inverse of first_stage(): `store(row, point, v)` gets the values.
template <class Plan, class Roots, class Store>
__device__ __forceinline__ void final_stage(const float2* rows, const Roots& root, Store&& store) {
  constexpr int kStride = Plan::kPoints / Plan::kRadix;
  for_each_butterfly<Plan, kStride>([&](int row, int t) {
    float2 v[Plan::kRadix];
    load_points<Plan::kRadix, kStride>(v, rows + row * Plan::kPitch, t);
    twiddle<true>(v, root, t);
    inverse_dft(v);
    store(row, t, v);
  });
}

// Of rows that are rows of a matrix themselves (long_rows.cuh).
constexpr int kLongRow = 4096;
using LongRowPlan = RowPlan<kLongRow, 256>;

}  // namespace warpwright::fft
