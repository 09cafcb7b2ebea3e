// What the kernels share: tiles of the image in shared memory, and the window's elements.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv2d_batch_norm_relu_max_pool2d/conv2d_batch_norm_relu_max_pool2d.h"

namespace warpwright {

// Element t of a window is channel t / (R * S) at row t / S % R and column t % S.
template <int kC_, int kR_, int kS_>
struct FewElementsWindow {
  static constexpr int kC = kC_, kR = kR_, kS = kS_;
  static constexpr int kElements = kC * kR * kS;
  static constexpr int kSums = static_cast<int>(window_sums(kElements));
  static constexpr int kVec = channels_per_thread(kElements);
};

// Calls f.operator()<Window>().
template <class F>
void for_window(FewElements window, F&& f) {
  switch (window) {
    case FewElements::k1x3x3:
      return f.template operator()<FewElementsWindow<1, 3, 3>>();
    case FewElements::k1x5x5:
      return f.template operator()<FewElementsWindow<1, 5, 5>>();
    case FewElements::k3x3x3:
      return f.template operator()<FewElementsWindow<3, 3, 3>>();
  }
}

// Of a row of a tile in shared memory: even, and the next row is 8 to 24 banks further. The lanes
// of a warp read near columns of two rows, the two that a pool window has.
inline int tile_pitch(int columns) {
  int pitch = columns + columns % 2;
  while (pitch % 32 < 8 || pitch % 32 > 24) pitch += 2;
  return pitch;
}

// A kernel argument.
struct TileWalk {
  int h, w, pad_h, pad_w;
  int p, q, out_p, out_q, k;
  int tile_p, tile_q, pitch;
  int tiles;
  bool channels_last;
  FastDivmod tiles_per_image, tiles_q;
  FastDivmod windows_q;  // pool windows of a tile's row

  TileWalk(const ConvNormPoolShape& shape, const ConvNormPoolPlan& plan)
      : h(static_cast<int>(shape.conv.h)),
        w(static_cast<int>(shape.conv.w)),
        pad_h(static_cast<int>(shape.conv.pad_h)),
        pad_w(static_cast<int>(shape.conv.pad_w)),
        p(static_cast<int>(shape.conv.p)),
        q(static_cast<int>(shape.conv.q)),
        out_p(static_cast<int>(shape.pool.out_height)),
        out_q(static_cast<int>(shape.pool.out_width)),
        k(static_cast<int>(shape.conv.k)),
        tile_p(plan.tile_p),
        tile_q(plan.tile_q),
        pitch(tile_pitch(plan.tile_q + static_cast<int>(shape.conv.s) - 1)),
        tiles(static_cast<int>(shape.conv.n * plan.tiles_p * plan.tiles_q)),
        channels_last(shape.conv.channels_last),
        tiles_per_image(plan.tiles_p * plan.tiles_q),
        tiles_q(plan.tiles_q),
        windows_q(plan.tile_q / 2) {}
};

// The outputs p0 .. and q0 .. of the convolution in one image.
struct ConvTile {
  int image, p0, q0;

  __device__ __forceinline__ ConvTile(const TileWalk& walk, int index) {
    int rest, down, across;
    walk.tiles_per_image.divmod(index, image, rest);
    walk.tiles_q.divmod(rest, down, across);
    p0 = down * walk.tile_p;
    q0 = across * walk.tile_q;
  }
};

// The part of x that a tile's windows see, as (C, tile_p + R - 1, pitch) floats in shared memory;
// the padding is zeros. Two buffers: the next tile is under way while this one is read.
template <class W>
struct ImageTiles {
  const TileWalk& walk;
  const float* x;
  float* buffers;

  static int64_t bytes(const TileWalk& walk) {
    return int64_t{2} * W::kC * (walk.tile_p + W::kR - 1) * walk.pitch * 4;
  }

  __device__ __forceinline__ int rows() const { return walk.tile_p + W::kR - 1; }
  __device__ __forceinline__ float* buffer(int turn) const {
    return buffers + turn % 2 * W::kC * rows() * walk.pitch;
  }

  // Starts the copies of a tile; a group is committed for an index past the last one, too.
  __device__ __forceinline__ void start(int index, int turn) const {
    if (index < walk.tiles) {
      const ConvTile tile(walk, index);
      const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
      constexpr int kWarps = kConvNormPoolThreads / kWarpSize;
      const int first_row = tile.p0 - walk.pad_h, first_column = tile.q0 - walk.pad_w;
      const int columns = walk.tile_q + W::kS - 1;
      const int64_t image = int64_t{tile.image} * walk.h * walk.w * W::kC;
      for (int line = warp; line < W::kC * rows(); line += kWarps) {
        const int c = W::kC == 1 ? 0 : line / rows(), row = line - c * rows();
        const int from_row = first_row + row;
        const bool row_exists = from_row >= 0 && from_row < walk.h;
        const int64_t place = walk.channels_last ? int64_t{from_row} * walk.w * W::kC + c
                                                 : (int64_t{c} * walk.h + from_row) * walk.w;
        const int step = walk.channels_last ? W::kC : 1;
        const uint32_t to = smem_address(buffer(turn) + line * walk.pitch);
        for (int column = lane; column < columns; column += kWarpSize) {
          const int from_column = first_column + column;
          const bool exists = row_exists && from_column >= 0 && from_column < walk.w;
          const float* from = exists ? x + image + place + from_column * step : x;
          cp_async<4>(to + column * 4, from, exists ? 4 : 0);
        }
      }
    }
    cp_async_commit();
  }

  // Calls f(index of the tile, its buffer) for the block's tiles. All threads of the block must
  // call.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    int turn = 0;
    for (int index = blockIdx.x; index < walk.tiles; index += gridDim.x, ++turn) {
      start(index + gridDim.x, turn + 1);
      cp_async_wait<1>();
      __syncthreads();
      f(index, buffer(turn));
      __syncthreads();  // before the buffer is written again
    }
  }
};

// The pool windows of a tile.
struct PoolTile {
  int rows, columns;  // that exist
  int64_t
      origin;  // of the first one in the output: in pixels of all images, or in an image's plane

  __device__ __forceinline__ PoolTile(const TileWalk& walk, int index) {
    const ConvTile tile(walk, index);
    const int p = tile.p0 / 2, q = tile.q0 / 2;
    rows = min(walk.tile_p / 2, walk.out_p - p);
    columns = min(walk.tile_q / 2, walk.out_q - q);
    const int64_t plane = int64_t{walk.out_p} * walk.out_q;
    origin = tile.image * (walk.channels_last ? plane : plane * walk.k) + p * walk.out_q + q;
  }
};

// A pool window of a tile.
struct PoolPlace {
  bool exists;
  int place;  // in the image tile
  int pixel;  // of the output, from the tile's origin on
};

// The pool windows of a tile that a thread has, slot, slot + slots, ..., for the channels k .. k +
// kVec - 1. Channels-last: neighbouring threads have neighbouring channels; planes: neighbouring
// windows. Threads that are too many have windows past the last one.
template <class W>
struct PoolThreads {
  int groups, slots, group, slot;

  __device__ __forceinline__ explicit PoolThreads(const TileWalk& walk)
      : groups(walk.k / W::kVec), slots(kConvNormPoolThreads / groups) {
    const int thread = threadIdx.x;
    group = walk.channels_last ? thread % groups : thread / slots;
    slot = walk.channels_last ? thread / groups : thread % slots;
    if (group >= groups || slot >= slots) group = 0, slot = windows(walk);
  }
  __device__ __forceinline__ int channel() const { return group * W::kVec; }

  __device__ __forceinline__ int windows(const TileWalk& walk) const {
    return walk.tile_p / 2 * (walk.tile_q / 2);
  }

  __device__ __forceinline__ PoolPlace place(const TileWalk& walk, const PoolTile& tile,
                                             int index) const {
    int down, across;
    walk.windows_q.divmod(index, down, across);
    return {.exists = down < tile.rows && across < tile.columns,
            .place = 2 * (down * walk.pitch + across),
            .pixel = down * walk.out_q + across};
  }

  // The thread's first channel of a tile's first window, in the output or what has its shape.
  template <class T>
  __device__ __forceinline__ T* first(const TileWalk& walk, const PoolTile& tile, T* all) const {
    if (walk.channels_last) return all + tile.origin * walk.k + channel();
    return all + tile.origin + channel() * (int64_t{walk.out_p} * walk.out_q);
  }
};

}  // namespace warpwright
