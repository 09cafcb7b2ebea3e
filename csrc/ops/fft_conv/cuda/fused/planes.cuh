// Planes: the transform of a pair of tiles of kPoints x kPoints = (16 q)^2 points in shared memory.
//
// Rows, then columns, each by a stage of radix q and one of radix 16, in place as in rows.cuh. Rows
// of zeros are neither transformed nor read, and rows without results are not transformed back.
// The pitch of kPoints + 1 lets neighbouring threads have neighbouring rows.
#pragma once

#include "ops/fft_conv/cuda/fused/rows.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

template <int kPoints>
struct PlanePlan {
  static_assert(kPoints % 16 == 0 && kPoints <= 128);
  static constexpr int kRadix = kPoints / 16;
  static constexpr int kPitch = kPoints + 1;
  static constexpr int64_t kSmemBytes = int64_t{8} * kPoints * kPitch;
  static constexpr int kSpectrum = kPoints * kPoints;
  // About 850 threads per SM, which have 72 registers each.
  static constexpr int kThreads = kPoints <= 48    ? 160
                                  : kPoints <= 64  ? 128
                                  : kPoints <= 80  ? 224
                                  : kPoints <= 96  ? 288
                                  : kPoints <= 112 ? 416
                                                   : 512;
  static constexpr int kBlocksPerSm = kPoints <= 48    ? 5
                                      : kPoints <= 64  ? 6
                                      : kPoints <= 80  ? 4
                                      : kPoints <= 96  ? 3
                                      : kPoints <= 112 ? 2
                                                       : 1;
};

// Rows [first, last) of a plane.
struct RowRange {
  int first, last;
  __device__ __forceinline__ int count() const { return last > first ? last - first : 0; }
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
template <int kPoints, class Roots, class Load>
__device__ __forceinline__ void transform_rows(float2* plane, const RowRange& rows,
                                               const Roots& root, Load&& load) {
  using Plan = PlanePlan<kPoints>;
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
template <int kPoints, class Roots, class F>
__device__ __forceinline__ void transform_columns(float2* plane, const RowRange& rows,
                                                  const Roots& root, F&& f) {
  using Plan = PlanePlan<kPoints>;
  for_each_of<Plan>(16 * kPoints, [&](int i) {
    const int t = i / kPoints, column = i % kPoints;
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
  for_each_of<Plan>(Plan::kRadix * kPoints, [&](int i) {
    const int block = i / kPoints, column = i % kPoints;
    float2* const at = plane + 16 * block * Plan::kPitch + column;
    float2 v[16];
    load_line(v, at, Plan::kPitch);
    dft(v);
    f(at, i, v);
  });
  __syncthreads();
}

// Columns back, of which the first `rows` rows are kept, then those rows. store(row, t, v) gets
// the points t + 16 j of a row.
template <int kPoints, class Roots, class Store>
__device__ __forceinline__ void inverse_plane(float2* plane, int rows, const Roots& root,
                                              Store&& store) {
  using Plan = PlanePlan<kPoints>;
  for_each_of<Plan>(16 * kPoints, [&](int i) {
    const int t = i / kPoints, column = i % kPoints;
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

// The kernel's spectrum, conjugated and divided by the number of points, as (channel, 16, q,
// kPoints). A block per channel.
template <class T, int kPoints>
__global__ void __launch_bounds__(PlanePlan<kPoints>::kThreads)
    weight_planes_kernel(const WeightOperands<T> p) {
  using Plan = PlanePlan<kPoints>;
  extern __shared__ float2 plane[];
  const int64_t channel = blockIdx.x;
  const ComputedRoots<kPoints> root;
  write_roots<kPoints>(p.roots);
  const RowRange rows{0, p.taps_down};
  transform_rows<kPoints>(plane, rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
    const int from_row = p.is_flipped ? p.taps_down - 1 - row : row;
    const T* const taps = p.taps + channel * p.channel + from_row * p.row;
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int tap = t + 16 * j;
      const int from = p.is_flipped ? p.taps_across - 1 - tap : tap;
      const bool is_tap = tap < p.taps_across;
      v[j] = make_float2(is_tap ? convert<float>(taps[from * p.column]) : 0.0f, 0.0f);
    }
  });
  transform_columns<kPoints>(plane, rows, root, [&](float2*, int i, float2(&v)[16]) {
    float2* const to = p.spectrum + channel * Plan::kSpectrum + i;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      constexpr float kScale = 1.0f / Plan::kSpectrum;
      to[k * (Plan::kSpectrum / 16)] = make_float2(v[k].x * kScale, -v[k].y * kScale);
    }
  });
}

// A pair of tiles; `signal` and `result` are at their first rows.
template <class T>
struct PairPlanes {
  TileRow<const T> signal[2];
  TileRow<T> result[2];
  RowRange signal_rows[2];
  int result_rows[2];
  int is_bad;
};

template <class T>
__device__ __forceinline__ PairPlanes<T> pair_planes(const CorrelateOperands<T>& p, int64_t pair,
                                                     int64_t channel, int points) {
  PairPlanes<T> planes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Item item = item_of(p, 2 * pair + i);
    planes.signal[i] = signal_row(p, item, channel, points);
    planes.signal[i].data += p.down.origin(item.row_tile) * p.signal_strides.row;
    planes.result[i] = result_row(p, item, channel);
    planes.result[i].data += item.row_tile * p.down.step * p.result_strides.row;
    planes.signal_rows[i] = {points, 0};
    planes.result_rows[i] = 0;
    if (item.exists) {
      planes.signal_rows[i] = {p.down.first(item.row_tile, points),
                               p.down.last(item.row_tile, points)};
      planes.result_rows[i] = p.down.results_of(item.row_tile);
    }
  }
  planes.is_bad = 0;
  return planes;
}

// The row of a tile, empty outside [rows.first, rows.last).
template <class T>
__device__ __forceinline__ TileRow<T> row_of(TileRow<T> tile, const RowRange& rows, int row,
                                             int64_t stride) {
  tile.data += row * stride;
  if (row < rows.first || row >= rows.last) tile.last = 0;
  return tile;
}

// Block i has channel i / blocks_per_channel and pairs_per_block of its pairs.
template <class T, int kPoints>
__global__ void __launch_bounds__(PlanePlan<kPoints>::kThreads, PlanePlan<kPoints>::kBlocksPerSm)
    correlate_planes_kernel(const CorrelateOperands<T> p) {
  using Plan = PlanePlan<kPoints>;
  extern __shared__ float2 plane[];
  __shared__ PairPlanes<T> tiles;
  const int64_t channel = blockIdx.x / p.blocks_per_channel;
  const int64_t begin = (blockIdx.x - channel * p.blocks_per_channel) * p.pairs_per_block;
  const int64_t end = begin + p.pairs_per_block < p.pairs ? begin + p.pairs_per_block : p.pairs;
  const TableRoots root{p.roots};
  const float2* const spectrum = p.spectrum + channel * Plan::kSpectrum;
  const float bias = p.bias != nullptr ? convert<float>(p.bias[channel]) : 0.0f;

  for (int64_t pair = begin; pair < end; ++pair) {
    if (threadIdx.x == 0) tiles = pair_planes(p, pair, channel, kPoints);
    __syncthreads();
    const RowRange in[2] = {tiles.signal_rows[0], tiles.signal_rows[1]};
    const RowRange rows{min(in[0].first, in[1].first), max(in[0].last, in[1].last)};
    transform_rows<kPoints>(plane, rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      const auto a = row_of(tiles.signal[0], in[0], row, p.signal_strides.row);
      const auto b = row_of(tiles.signal[1], in[1], row, p.signal_strides.row);
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        v[j] = make_float2(a.load(t + 16 * j), b.load(t + 16 * j));
      }
    });
    transform_columns<kPoints>(plane, rows, root, [&](float2* at, int i, float2(&v)[16]) {
      const float2* const from = spectrum + i;
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = multiply(v[k], __ldg(from + k * (Plan::kSpectrum / 16)));
      inverse_dft(v);
      store_line(v, at, Plan::kPitch);
    });
    const int out[2] = {tiles.result_rows[0], tiles.result_rows[1]};
    inverse_plane<kPoints>(plane, max(out[0], out[1]), root,
                           [&](int row, int t, const float2(&v)[Plan::kRadix]) {
      const auto a = row_of(tiles.result[0], {0, out[0]}, row, p.result_strides.row);
      const auto b = row_of(tiles.result[1], {0, out[1]}, row, p.result_strides.row);
      bool is_finite = true;
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        is_finite &= a.store(t + 16 * j, v[j].x + bias);
        is_finite &= b.store(t + 16 * j, v[j].y + bias);
      }
      if (!is_finite) tiles.is_bad = 1;
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      p.flags[channel * p.pairs + pair] = static_cast<uint8_t>(tiles.is_bad);
    }
  }
}

}  // namespace warpwright::fft
