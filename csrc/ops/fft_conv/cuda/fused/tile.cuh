// What the fused kernels share: pairs of tiles, their elements in memory, and the walk of a block.
//
// The kernel is real, so two tiles of one channel ride as the real and the imaginary part of one
// complex tile: the product with the kernel's spectrum mixes nothing, and no spectra are separated.
#pragma once

#include "device/types.cuh"
#include "ops/fft_conv/cuda/fused/dft.cuh"

namespace warpwright::fft {

// One dimension of the tiles of an image. Tile i reads `points` elements from i * step + start on,
// zeros outside [0, extent), and has the results from i * step on.
struct Axis {
  int64_t extent, results;
  int64_t step, start;
  int64_t tiles;

  // Positions of tile i inside the image: [first, last).
  __device__ __forceinline__ int first(int64_t i, int points) const {
    return clamp(-origin(i), points);
  }
  __device__ __forceinline__ int last(int64_t i, int points) const {
    return clamp(extent - origin(i), points);
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

// Strides in elements.
struct Strides {
  int64_t image, channel, row, column;
};

// The tiles of one channel, `across.tiles * down.tiles` per image, are numbered image by image and
// paired in that order. Pair i of a channel is tiles 2 i and 2 i + 1.
template <class T>
struct CorrelateOperands {
  const T* signal;
  const T* bias;  // per channel, or null
  T* result;
  const float2* spectrum;  // of each channel's kernel, as the kernel of weights writes it
  const float2* roots;     // exp(-2 pi i j / points)
  uint8_t* flags;          // per pair: some result is not finite
  Strides signal_strides, result_strides;
  Axis down, across;
  int64_t tiles;  // of a channel, all images
  int64_t pairs;
  int64_t blocks_per_channel;
  int pairs_per_block;
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

template <class T>
__device__ __forceinline__ TileRow<const T> signal_row(const CorrelateOperands<T>& p,
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

template <class T>
__device__ __forceinline__ TileRow<T> result_row(const CorrelateOperands<T>& p, const Item& item,
                                                 int64_t channel) {
  const Strides& s = p.result_strides;
  TileRow<T> row;
  row.stride = s.column;
  row.data = p.result + item.image * s.image + channel * s.channel +
             item.column_tile * p.across.step * s.column;
  row.first = 0;
  row.last = item.exists ? p.across.results_of(item.column_tile) : 0;
  return row;
}

}  // namespace warpwright::fft
