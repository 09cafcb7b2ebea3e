// What the kernels between planes and rows of channels share, for elements of 16 and of 32 bits.
#pragma once

#include <stdexcept>

#include "common/ceil_div.h"
#include "common/switch.h"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv2d/cuda/layout/change.h"

namespace warpwright {

// launch_planes_to_rows() and launch_rows_to_planes() of 32-bit elements.
void launch_planes_to_rows_32bit(const LayoutTensor& tensor, const void* planes, void* rows,
                                 cudaStream_t stream);
void launch_rows_to_planes_32bit(const LayoutTensor& tensor, const void* rows, void* planes,
                                 cudaStream_t stream);

// A CTA's tile: 256 bytes of pixels of each channel.
constexpr int kTileChannels = 64, kLayoutThreads = 256;
constexpr int kLayoutWarps = kLayoutThreads / 32;
template <class E>
constexpr int kLayoutPixels = 256 / static_cast<int>(sizeof(E));

// E: uint16_t or uint32_t, any element of as many bits.
template <class E>
struct LayoutParams {
  const E* from;
  E* to;
  FastDivmod by_plane;    // pixels of a plane
  FastDivmod by_tiles_c;  // tiles of channels
  int all_pixels;         // of all images
  int channels;
  int64_t image, plane;  // elements of planes
  // A sample's steps, extents and columns; kSampled kernels.
  int step_h, step_w, height, width;
  FastDivmod by_columns;

  struct Place {
    int channel, pixel;
  };
  __device__ __forceinline__ Place first() const {
    int tile_pixel, tile_channel;
    by_tiles_c.divmod(static_cast<int>(blockIdx.x), tile_pixel, tile_channel);
    return {tile_channel * kTileChannels, tile_pixel * kLayoutPixels<E>};
  }
  // Element (channel, pixel of rows) in planes.
  template <bool kSampled>
  __device__ __forceinline__ int64_t in_planes(int channel, int pixel) const {
    int image_index, in_plane;
    by_plane.divmod(pixel, image_index, in_plane);
    if constexpr (kSampled) {
      int row, col;
      by_columns.divmod(in_plane, row, col);
      in_plane = row * step_h * width + col * step_w;
    }
    return image_index * image + channel * plane + in_plane;
  }
  // Rows and columns of planes from a sample's pixel to the next one.
  struct Cell {
    int rows, cols;
  };
  __device__ __forceinline__ Cell cell(int pixel) const {
    int row, col;
    by_columns.divmod(pixel - by_plane.quotient(pixel) * static_cast<int>(by_plane.divisor), row,
                      col);
    return {min(step_h, height - row * step_h), min(step_w, width - col * step_w)};
  }
};

// Stores a sample's pixel, and zeros up to the next one's row and column. Two columns leave in one
// aligned access if possible.
template <class E>
__device__ __forceinline__ void store_cell(E* to, E value, typename LayoutParams<E>::Cell cell,
                                           int width) {
  const bool pair =
      cell.cols == 2 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(E)) == 0 && width % 2 == 0;
  for (int row = 0; row < cell.rows; ++row, to += width) {
    const E first = row == 0 ? value : E{0};
    if (pair) {
      store_vec(to, Vec<E, 2>{first, E{0}});
    } else {
      to[0] = first;
      for (int col = 1; col < cell.cols; ++col) to[col] = 0;
    }
  }
}

// Calls launch_kernel.operator()<kVec, kSampled>(grid, params).
template <class E, class Launch>
void change_layout(const LayoutTensor& tensor, const void* from, void* to, const void* planes,
                   Launch&& launch_kernel) {
  const int64_t all_pixels = tensor.images * tensor.pixels;
  const int64_t tiles_c = ceil_div<int64_t>(tensor.channels, kTileChannels);
  const int64_t blocks = ceil_div<int64_t>(all_pixels, kLayoutPixels<E>) * tiles_c;
  if (!tensor.can_change() || blocks > kMaxGridX) {
    throw std::logic_error("warpwright: conv2d: the plan copies a layout that the copies exclude");
  }
  LayoutParams<E> params{};
  params.from = static_cast<const E*>(from);
  params.to = static_cast<E*>(to);
  params.by_plane = FastDivmod(tensor.pixels);
  params.by_tiles_c = FastDivmod(tiles_c);
  params.all_pixels = static_cast<int>(all_pixels);
  params.channels = static_cast<int>(tensor.channels);
  params.plane = tensor.pixels;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (tensor.sample) {
    const PlaneSample& sample = *tensor.sample;
    params.step_h = static_cast<int>(sample.step_h);
    params.step_w = static_cast<int>(sample.step_w);
    params.height = static_cast<int>(sample.height);
    params.width = static_cast<int>(sample.width);
    params.by_columns = FastDivmod(sample.columns);
    params.plane = sample.height * sample.width;
    params.image = tensor.channels * params.plane;
    return launch_kernel.template operator()<1, true>(grid, params);
  }
  params.image = tensor.channels * params.plane;
  const int size = plane_vector(tensor.pixels, reinterpret_cast<uintptr_t>(planes), sizeof(E));
  const auto launch_vector = [&]<int kVec>() {
    launch_kernel.template operator()<kVec, false>(grid, params);
  };
  if constexpr (sizeof(E) == 2) {
    for_int<8, 4, 2, 1>(size, launch_vector);
  } else {
    for_int<4, 2, 1>(size, launch_vector);
  }
}

}  // namespace warpwright
