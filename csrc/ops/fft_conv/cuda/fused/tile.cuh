// Shared by the fused kernels: pairs of tiles, their elements in memory, and the walk of a block.
//
// Two tiles of one channel are the real and the imaginary part of one complex tile. The kernel is
// real, so the product with its spectrum keeps the parts apart, and no spectra are separated.
#pragma once

#include "device/types.cuh"
#include "ops/fft_conv/cuda/fused/dft.cuh"
#include "ops/fft_conv/fft_conv.h"

namespace warpwright::fft {

// Positions of a dimension's tiles, as a tile's 32-bit indices.
struct Axis : FftAxis {
  Axis() = default;
  __host__ explicit Axis(const FftAxis& axis) : FftAxis(axis) {}

  // Positions of tile i inside the signal: [first, last).
  __device__ __forceinline__ int first(int64_t i, int limit) const {
    return clamp(-origin(i), limit);
  }
  __device__ __forceinline__ int last(int64_t i, int limit) const {
    return clamp(extent - origin(i), limit);
  }
  __device__ __forceinline__ int results_of(int64_t i) const {
    return clamp(results - i * step, static_cast<int>(step));
  }
  __device__ __forceinline__ int64_t origin(int64_t i) const { return i * step + start; }

 private:
  static __device__ __forceinline__ int clamp(int64_t position, int limit) {
    return static_cast<int>(position < 0 ? 0 : position > limit ? limit : position);
  }
};

using Strides = FftStrides;

// Rows [first, last) of a plane.
struct RowRange {
  int first, last;

  __device__ __forceinline__ int count() const { return last > first ? last - first : 0; }
};

__device__ __forceinline__ RowRange both(const RowRange& a, const RowRange& b) {
  return {a.first < b.first ? a.first : b.first, a.last > b.last ? a.last : b.last};
}

// The tiles of one channel, `across.tiles * down.tiles` per image, are numbered image by image and
// paired in that order. Pair i of a channel is tiles 2 i and 2 i + 1.
template <class T, class Result>
struct PairOperands {
  const T* signal;
  Result* result;
  Strides signal_strides, result_strides;
  Axis down, across;
  int64_t channels;
  int64_t tiles;  // of a channel, all images
  int64_t pairs;
};

// result = signal correlated with a kernel per channel.
template <class T>
struct CorrelateOperands : PairOperands<T, T> {
  const T* bias;           // per channel, or null
  const float2* spectrum;  // of each channel's kernel, as the kernel of weights writes it
  const float2* roots;     // exp(-2 pi i j / points)
  uint8_t* flags;          // (pair, channel): some result is not finite
  int64_t blocks_per_channel;
  int pairs_per_block;
};

// A channel's kernels, and their spectra.
template <class T>
struct WeightOperands {
  const T* taps;
  int64_t channel, row, column;  // strides, negative for flipped kernels
  int taps_down, taps_across;
  float2* spectrum;
  float2* roots;  // written for the kernels that follow
};

// The gradient of the kernels. `result` is the gradient of the correlation's result.
template <class T>
struct GradientOperands : PairOperands<T, const T> {
  const float2* roots;
  float2* partial;  // (channel, part, a spectrum)
  int64_t parts;    // blocks per channel
  int64_t pairs_per_part;
};

// Adds the parts of a channel in order.
template <class T>
struct GradientSumOperands {
  const float2* roots;
  const float2* partial;
  int64_t parts;
  T* taps;
  int64_t channel, row, column;  // strides of taps
  int taps_down, taps_across;
  uint8_t* flags;  // per channel: some tap is not finite
};

// One of the two tiles.
struct Item {
  int64_t image, row_tile, column_tile;
  bool exists;
};

template <class Operands>
__device__ __forceinline__ Item item_of(const Operands& p, int64_t tile) {
  const int64_t per_image = p.down.tiles * p.across.tiles;
  Item item;
  item.exists = tile < p.tiles;
  item.image = tile / per_image;
  const int64_t in_image = tile - item.image * per_image;
  item.row_tile = in_image / p.across.tiles;
  item.column_tile = in_image - item.row_tile * p.across.tiles;
  return item;
}

// A row of a tile in memory: element i is at data[i * stride] if first <= i < last.
template <class T>
struct TileRow {
  T* data;
  int64_t stride;
  int first, last;

  __device__ __forceinline__ float load(int i) const {
    return i >= first && i < last ? convert<float>(data[i * stride]) : 0.0f;
  }
  // Returns whether the value is finite; positions outside are.
  __device__ __forceinline__ bool store(int i, float value) const {
    if (i >= last) return true;
    data[i * stride] = convert<std::remove_const_t<T>>(value);
    return isfinite(value);
  }
};

template <class T, class Result>
__device__ __forceinline__ TileRow<const T> signal_row(const PairOperands<T, Result>& p,
                                                       const Item& item, int64_t channel,
                                                       int points) {
  const Strides& s = p.signal_strides;
  TileRow<const T> row;
  row.stride = s.column;
  row.data = p.signal + item.image * s.image + channel * s.channel +
             p.across.origin(item.column_tile) * s.column;
  row.first = p.across.first(item.column_tile, points);
  row.last = item.exists ? p.across.last(item.column_tile, points) : 0;
  return row;
}

template <class T, class Result>
__device__ __forceinline__ TileRow<Result> result_row(const PairOperands<T, Result>& p,
                                                      const Item& item, int64_t channel) {
  const Strides& s = p.result_strides;
  TileRow<Result> row;
  row.stride = s.column;
  row.data = p.result + item.image * s.image + channel * s.channel +
             item.column_tile * p.across.step * s.column;
  row.first = 0;
  row.last = item.exists ? p.across.results_of(item.column_tile) : 0;
  return row;
}

// Points t + kStride j of two rows as the parts of complex numbers; one row after the other, which
// keeps the addresses of one in registers.
template <int kStride, int kRadix, class T>
__device__ __forceinline__ void load_pair(float2 (&v)[kRadix], const TileRow<T>& a,
                                          const TileRow<T>& b, int t) {
#pragma unroll
  for (int j = 0; j < kRadix; ++j) v[j].x = a.load(t + kStride * j);
#pragma unroll
  for (int j = 0; j < kRadix; ++j) v[j].y = b.load(t + kStride * j);
}

// Returns whether all values are finite.
template <int kStride, int kRadix, class T>
__device__ __forceinline__ bool store_pair(const float2 (&v)[kRadix], const TileRow<T>& a,
                                           const TileRow<T>& b, int t, float bias) {
  bool is_finite = true;
#pragma unroll
  for (int j = 0; j < kRadix; ++j) is_finite &= a.store(t + kStride * j, v[j].x + bias);
#pragma unroll
  for (int j = 0; j < kRadix; ++j) is_finite &= b.store(t + kStride * j, v[j].y + bias);
  return is_finite;
}

// A pair of tiles of one row each.
template <class T, class Result>
struct PairRows {
  TileRow<const T> signal[2];
  TileRow<Result> result[2];
  int is_bad;
};

template <class T, class Result>
__device__ __forceinline__ PairRows<T, Result> pair_rows(const PairOperands<T, Result>& p,
                                                         int64_t pair, int64_t channel,
                                                         int points) {
  PairRows<T, Result> rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Item item = item_of(p, 2 * pair + i);
    rows.signal[i] = signal_row(p, item, channel, points);
    rows.result[i] = result_row(p, item, channel);
  }
  rows.is_bad = 0;
  return rows;
}

// A pair of tiles; `signal` and `result` are at their first rows.
template <class T, class Result>
struct PairPlanes {
  TileRow<const T> signal[2];
  TileRow<Result> result[2];
  RowRange signal_rows[2];
  int result_rows[2];
  int is_bad;
};

template <class T, class Result>
__device__ __forceinline__ PairPlanes<T, Result> pair_planes(const PairOperands<T, Result>& p,
                                                             int64_t pair, int64_t channel,
                                                             int points) {
  PairPlanes<T, Result> planes;
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

template <int kPoints>
__device__ __forceinline__ void write_roots(float2* roots) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < kPoints;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    roots[i] = exact_root(i, kPoints);
  }
}

}  // namespace warpwright::fft
