// Transforms of a complex plane of (16 q)^2 points in shared memory by all threads of a block.
//
// Rows, then columns, each by a stage of radix q and one of radix 16, in place as in rows.cuh. Rows
// of zeros are neither transformed nor read, and rows without results are not transformed back.
// The pitch of kPoints + 1 lets neighbouring threads have neighbouring rows.
#pragma once

#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

template <int kPoints_, int kThreads_>
struct PlanePlan {
  static_assert(kPoints_ % 16 == 0 && kPoints_ <= 128);
  static constexpr int kPoints = kPoints_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRadix = kPoints / 16;
  static constexpr int kPitch = kPoints + 1;
  static constexpr int kElements = kPoints * kPitch;
  static constexpr int kSpectrum = kPoints * kPoints;
};

// kRadix points kStride apart from `at` on, which `step` elements separate.
template <int kRadix>
__device__ __forceinline__ void load_line(float2 (&v)[kRadix], const float2* at, int step) {
#pragma unroll
  for (int j = 0; j < kRadix; ++j) v[j] = at[j * step];
}
template <int kRadix>
__device__ __forceinline__ void store_line(const float2 (&v)[kRadix], float2* at, int step) {
#pragma unroll
  for (int j = 0; j < kRadix; ++j) at[j * step] = v[j];
}

template <class Plan, class F>
__device__ __forceinline__ void for_each_of(int count, F&& f) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += Plan::kThreads) f(i);
}

// load(row, t, v): the points t + 16 j of a row.
template <class Plan, class Roots, class Load>
__device__ __forceinline__ void transform_rows(float2* plane, const RowRange& rows,
                                               const Roots& root, Load&& load) {
  for_each_of<Plan>(rows.count() * 16, [&](int i) {
    const int row = rows.first + i / 16, t = i % 16;
    float2 v[Plan::kRadix];
    load(row, t, v);
    dft(v);
    twiddle<false>(v, root, t);
    store_line(v, plane + row * Plan::kPitch + t, 16);
  });
  __syncthreads();
  for_each_of<Plan>(rows.count() * Plan::kRadix, [&](int i) {
    const int block = i / rows.count(), row = rows.first + i - block * rows.count();
    float2* const at = plane + row * Plan::kPitch + 16 * block;
    float2 v[16];
    load_line(v, at, 1);
    dft(v);
    store_line(v, at, 1);
  });
  __syncthreads();
}

// Columns; the last stage hands 16 points to f(plane at the first point, column, block, v).
template <class Plan, class Roots, class F>
__device__ __forceinline__ void transform_columns(float2* plane, const RowRange& rows,
                                                  const Roots& root, F&& f) {
  for_each_of<Plan>(16 * Plan::kPoints, [&](int i) {
    const int t = i / Plan::kPoints, column = i % Plan::kPoints;
    float2 v[Plan::kRadix];
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int row = t + 16 * j;
      const bool is_zero = row < rows.first || row >= rows.last;
      v[j] = is_zero ? make_float2(0.0f, 0.0f) : plane[row * Plan::kPitch + column];
    }
    dft(v);
    twiddle<false>(v, root, t);
    store_line(v, plane + t * Plan::kPitch + column, 16 * Plan::kPitch);
  });
  __syncthreads();
  for_each_of<Plan>(Plan::kRadix * Plan::kPoints, [&](int i) {
    const int block = i / Plan::kPoints, column = i % Plan::kPoints;
    float2* const at = plane + 16 * block * Plan::kPitch + column;
    float2 v[16];
    load_line(v, at, Plan::kPitch);
    dft(v);
    f(at, i, v);
  });
  __syncthreads();
}

// The inverse transform: columns first, then the first `rows` rows of the result. store(row, t, v)
// gets the points t + 16 j of a row.
template <class Plan, class Roots, class Store>
__device__ __forceinline__ void inverse_plane(float2* plane, int rows, const Roots& root,
                                              Store&& store) {
  for_each_of<Plan>(16 * Plan::kPoints, [&](int i) {
    const int t = i / Plan::kPoints, column = i % Plan::kPoints;
    if (t >= rows) return;
    float2* const at = plane + t * Plan::kPitch + column;
    float2 v[Plan::kRadix];
    load_line(v, at, 16 * Plan::kPitch);
    twiddle<true>(v, root, t);
    inverse_dft(v);
    store_line(v, at, 16 * Plan::kPitch);
  });
  __syncthreads();
  for_each_of<Plan>(rows * Plan::kRadix, [&](int i) {
    const int block = i / rows, row = i - block * rows;
    float2* const at = plane + row * Plan::kPitch + 16 * block;
    float2 v[16];
    load_line(v, at, 1);
    inverse_dft(v);
    store_line(v, at, 1);
  });
  __syncthreads();
  for_each_of<Plan>(rows * 16, [&](int i) {
    const int row = i / 16, t = i % 16;
    float2 v[Plan::kRadix];
    load_line(v, plane + row * Plan::kPitch + t, 16);
    twiddle<true>(v, root, t);
    inverse_dft(v);
    store(row, t, v);
  });
}

}  // namespace warpwright::fft
