// How the pooling kernels number their work. An item is a small tile of rows x columns at one
// vector of channels. Items are numbered channels first, then columns, then rows of all images.
#pragma once

#include <algorithm>

#include "device/access.cuh"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace warpwright {

constexpr int kPoolThreads = 256;

// The window as the kernels hold it: 32-bit extents, 64-bit pitches.
struct PoolShape {
  int height, width, out_height, out_width;
  int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int channels;
  int64_t in_row, in_image;    // elements between rows / images
  int64_t out_row, out_image;  //

  explicit PoolShape(const MaxPool2dGeometry& g)
      : height(static_cast<int>(g.height)),
        width(static_cast<int>(g.width)),
        out_height(static_cast<int>(g.out_height)),
        out_width(static_cast<int>(g.out_width)),
        kernel_h(static_cast<int>(g.kernel_h)),
        kernel_w(static_cast<int>(g.kernel_w)),
        stride_h(static_cast<int>(g.stride_h)),
        stride_w(static_cast<int>(g.stride_w)),
        pad_h(static_cast<int>(g.pad_h)),
        pad_w(static_cast<int>(g.pad_w)),
        dilation_h(static_cast<int>(g.dilation_h)),
        dilation_w(static_cast<int>(g.dilation_w)),
        channels(static_cast<int>(g.channels)),
        in_row(g.width * g.channels),
        in_image(g.height * g.width * g.channels),
        out_row(g.out_width * g.channels),
        out_image(g.out_height * g.out_width * g.channels) {}
};

struct PoolItem {
  int64_t image;
  int row, column;  // in tiles
  int channel;      // in elements, the first of the vector
};

// Items [0, items) of one launch, which starts at (first_image, first_row).
struct PoolWalk {
  FastDivmod vectors, columns, rows;
  int64_t first_image;
  int first_row;
  int items;

  __device__ __forceinline__ PoolItem at(int item, int vec) const {
    int tile, vector;
    vectors.divmod(item, tile, vector);
    PoolItem result = of_channel(tile);
    result.channel = vector * vec;
    return result;
  }
  // The same for one channel.
  __device__ __forceinline__ PoolItem of_channel(int item) const {
    PoolItem result;
    int rest, image;
    result.channel = 0;
    columns.divmod(item, rest, result.column);
    rows.divmod(rest + first_row, image, result.row);
    result.image = first_image + image;
    return result;
  }
};

// Divides the work into launches of at most 2^30 items (FastDivmod ends at 2^31), or of one row of
// tiles. Nearly always one launch. Calls `launch_one(walk, blocks)`.
template <class F>
void for_each_walk(const MaxPool2dGeometry& g, int64_t tile_rows, int64_t tile_columns, int vec,
                   F&& launch_one) {
  constexpr int64_t kMaxItems = int64_t{1} << 30;
  const int64_t vectors = g.channels / vec;
  const int64_t per_row = tile_columns * vectors;
  const int64_t rows = g.images * tile_rows;
  if (rows == 0 || per_row == 0) return;
  // Fits 31 bits, with the tiles that reach past the border and the threads of a launch.
  constexpr int64_t kMaxExtent = (int64_t{1} << 31) - kPoolThreads;
  if (per_row > kMaxExtent || tile_rows > kMaxItems || g.width * g.channels > kMaxExtent ||
      g.height > kMaxExtent) {
    throw std::runtime_error(
        "max_pool2d: input: the height, or a row of width * channels, exceeds 2^31 elements");
  }
  const int64_t rows_per_launch = std::max<int64_t>(kMaxItems / per_row, 1);
  for (int64_t begin = 0; begin < rows; begin += rows_per_launch) {
    const int64_t items = std::min(rows_per_launch, rows - begin) * per_row;
    PoolWalk walk;
    walk.vectors = FastDivmod(vectors);
    walk.columns = FastDivmod(tile_columns);
    walk.rows = FastDivmod(tile_rows);
    walk.first_image = begin / tile_rows;
    walk.first_row = static_cast<int>(begin % tile_rows);
    walk.items = static_cast<int>(items);
    launch_one(walk, static_cast<unsigned>(ceil_div<int64_t>(items, kPoolThreads)));
  }
}

__device__ __forceinline__ bool in_range(int x, int extent) {
  return static_cast<unsigned>(x) < static_cast<unsigned>(extent);
}

// Outputs of a row per thread, and twice as many inputs (kPlane backward: one).
template <class T, PoolSpan kSpan>
constexpr int kPoolSpanOutputs = is_wide(kSpan) && kSpan != PoolSpan::kPairs ? kVecSize<T> / 2 : 1;

// Offset of a row in its image: an unsigned product of two extents of 31 bits (see
// for_each_walk()), which is one instruction.
__device__ __forceinline__ int64_t row_offset(int row, int64_t pitch) {
  return static_cast<int64_t>(uint64_t{static_cast<uint32_t>(row)} * static_cast<uint32_t>(pitch));
}

// An item of kWideRow: the offset of its outputs and of the upper row of their inputs. The windows
// tile the images, so rows of outputs, and pairs of rows of inputs, are numbered through all
// images. One division places a thread.
struct PoolRowPlace {
  int64_t output, input;

  static PoolRowPlace first(const MaxPool2dGeometry& g, const PoolWalk& walk) {
    const int64_t row = walk.first_image * g.out_height + walk.first_row;
    return {row * g.out_width, row * 2 * g.width};
  }
  // The place of a launch's item, relative to its first one.
  template <int kOut>
  __device__ __forceinline__ PoolRowPlace of_item(const PoolShape& shape, const PoolWalk& walk,
                                                  int item) const {
    const int64_t outputs = static_cast<int64_t>(item) * kOut;
    const int64_t rows = row_offset(walk.columns.quotient(item), shape.in_row);
    return {output + outputs, input + 2 * outputs + rows};
  }
};

// Stores adjacent elements in one access. The compiler would split the store of a Vec.
template <class T, int kSize>
__device__ __forceinline__ void store_neighbors(T* pointer, const Vec<T, kSize>& values) {
  if constexpr (sizeof(values) == 16) {
    store_vec_global(pointer, values);
  } else if constexpr (sizeof(values) == 8) {
    store_pair_global(pointer, *reinterpret_cast<const uint2*>(&values));
  } else {
    static_assert(sizeof(values) == 4, "an access of 4, 8 or 16 bytes");
    store_pair_global(pointer, *reinterpret_cast<const uint32_t*>(&values));
  }
}

// Calls f<T, V, kWindow, kSpan>() for a plan.
template <class F>
void for_pool_plan(DType dtype, const MaxPool2dPlan& plan, F&& f) {
  for_dtype(dtype, [&]<class T>() {
    constexpr int kVec = kVecSize<T>;
    for_int<0, 2, 3>(plan.window, [&]<int kWindow>() {
      auto run = [&]<int V, PoolSpan kSpan>() { f.template operator()<T, V, kWindow, kSpan>(); };
      if (plan.vec == kVec) return run.template operator()<kVec, PoolSpan::kColumn>();
      if constexpr (kWindow != 0) {
        switch (plan.span) {
          case PoolSpan::kPlane:
            return run.template operator()<1, PoolSpan::kPlane>();
          case PoolSpan::kWide:
            return run.template operator()<1, PoolSpan::kWide>();
          case PoolSpan::kPairs:
            if constexpr (kWindow == 2) return run.template operator()<1, PoolSpan::kPairs>();
            break;
          case PoolSpan::kWideRow:
            if constexpr (kWindow == 2) return run.template operator()<1, PoolSpan::kWideRow>();
            break;
          case PoolSpan::kWideLeft:
            if constexpr (kWindow == 3) return run.template operator()<1, PoolSpan::kWideLeft>();
            break;
          case PoolSpan::kColumn:
            break;
        }
      }
      run.template operator()<1, PoolSpan::kColumn>();
    });
  });
}

}  // namespace warpwright
