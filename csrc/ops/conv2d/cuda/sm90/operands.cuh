// How the operands of a convolution's three products reach the stages of the sm_90a matrix product
// (gemm/kernel_sm90.cuh), for dense NHWC images and KRSC weights. Windows come by TMA's im2col
// mode: a box is 64 channels of consecutive output pixels at one filter tap. Padding reads as zero.
//
//   product  D               A (M side)                      B (N side)                k runs over
//   fprop    y (NPQ, K)      windows of x                    w, K-major                taps, C
//   dgrad    dx (NHW, C)     windows of dy, mirrored taps    w, MN-major               taps, K
//   wgrad    dw (K, RS C)    dy, MN-major                    windows of x, MN-major    pixels
//
// dgrad of stride 1 is a convolution of dy with the mirrored filter. With a larger stride it is one
// convolution per phase of dx's rows and columns, each with the taps that reach the phase. A k tile
// of fprop and dgrad is 64 channels under one tap; channels past the last one read as zero on both
// sides. C and K are those of a group, because a tile of D is within one group.
#pragma once

#include "device/math.cuh"
#include "gemm/sm90.cuh"

namespace warpwright {

// The position of an output pixel: where its window's first tap is in the image.
struct WindowGeometry {
  FastDivmod by_q, by_pq;
  int stride_h, stride_w, pad_h, pad_w;

  struct Place {
    int n, h, w;
  };
  __device__ __forceinline__ Place place(int pixel) const {
    Place at;
    int in_image, p, q;
    by_pq.divmod(pixel, at.n, in_image);
    by_q.divmod(in_image, p, q);
    at.h = p * stride_h - pad_h;
    at.w = q * stride_w - pad_w;
    return at;
  }
};

// 64 channels under a tap: one k tile of fprop and dgrad, one block of 64 columns of wgrad.
struct TapGeometry {
  FastDivmod by_chunks;  // of 64 channels, per tap
  FastDivmod by_s;       // taps per row of a window
  int chunks;            // of all taps
  int dilation_h, dilation_w;
  // The filter's tap for a window's first tap, and the steps to the next row's and the next
  // column's tap.
  int first_tap, row_step, col_step;

  struct Place {
    int filter_tap, channel;
    uint16_t offset_h, offset_w;  // of the tap from the first one
  };
  __device__ __forceinline__ Place place(int index) const {
    Place at;
    int tap, chunk, r, s;
    by_chunks.divmod(index, tap, chunk);
    by_s.divmod(tap, r, s);
    at.filter_tap = first_tap + r * row_step + s * col_step;
    at.channel = chunk * 64;
    at.offset_h = static_cast<uint16_t>(r * dilation_h);
    at.offset_w = static_cast<uint16_t>(s * dilation_w);
    return at;
  }
};

// kRows windows as the K-major operand of one tile.
template <int kRows>
struct WindowLoader {
  const CUtensorMap* map;
  TapGeometry taps;
  WindowGeometry::Place at;
  int first_channel;  // of the group

  __device__ __forceinline__ void load(uint32_t shared, int, int k_tile, uint32_t barrier) const {
    const TapGeometry::Place tap = taps.place(k_tile);
    tma_load_im2col_4d(shared, map, first_channel + tap.channel, at.w, at.h, at.n, tap.offset_w,
                       tap.offset_h, barrier);
  }
};

// Weights under the k tile's tap: kRows filters, K-major, or kRows channels of 64 filters,
// MN-major.
template <Major kMajor, int kRows>
struct WeightLoader {
  const CUtensorMap* map;
  TapGeometry taps;
  int first_filter;  // MN-major: of the group

  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
    const TapGeometry::Place tap = taps.place(k_tile);
    if constexpr (kMajor == Major::kK) {
      tma_load_4d(shared, map, tap.channel, first_row, tap.filter_tap, 0, barrier);
    } else {
#pragma unroll
      for (int row = 0; row < kRows; row += 64) {
        tma_load_4d(shared + row * 128, map, first_row + row, first_filter + tap.channel,
                    tap.filter_tap, 0, barrier);
      }
    }
  }
};

// Windows of 64 pixels as the MN-major operand: kRows columns, each 64 one tap's channels.
template <int kRows>
struct WindowColumnLoader {
  const CUtensorMap* map;
  TapGeometry taps;
  WindowGeometry windows;
  int first_channel;  // of the group

  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
    const WindowGeometry::Place at = windows.place(k_tile * 64);
#pragma unroll
    for (int row = 0; row < kRows; row += 64) {
      // Columns past the last are not stored, so their channels do not matter.
      const TapGeometry::Place tap = taps.place(min((first_row + row) / 64, taps.chunks - 1));
      tma_load_im2col_4d(shared + row * 128, map, first_channel + tap.channel, at.w, at.h, at.n,
                         tap.offset_w, tap.offset_h, barrier);
    }
  }
};

// ---- Loadings ----

// `a` and `b` are the maps of A and B.
struct ConvOperandsSm90 {
  static constexpr int kWarpgroups = 1;
  static constexpr int kRegisters = kProducerRegisters;
  static constexpr int kConsumerRegisters = warpwright::kConsumerRegisters;

  CUtensorMap a, b;
  WindowGeometry windows;
  TapGeometry taps;
  FastDivmod by_group;  // columns of D per group; wgrad: rows
  int group_channels;   // of the image of windows

  __device__ __forceinline__ void prefetch() const {
    prefetch_tensor_map(&a);
    prefetch_tensor_map(&b);
  }
  __device__ __forceinline__ int arrivals() const { return 1; }

 protected:
  // One thread calls it. load_tile(row, col, produce) makes the loaders of the tile of D at (row,
  // col). It calls produce(loader of A, its first row, loader of B, its first row).
  template <class Tile, class Loop, class Params, class LoadTile>
  __device__ __forceinline__ void produce_tiles(const Loop& loop, const Params& p, unsigned first,
                                                unsigned stride, const LoadTile& load_tile) const {
    if (threadIdx.x != 0) return;
    typename Loop::Cursor cursor;
    for (unsigned block = first; block < p.num_blocks; block += stride) {
      const TileCoord tile = tile_of_block(p.grid, block);
      load_tile(first_m<Tile>(tile), first_n<Tile>(tile, {}),
                [&](const auto& loader_a, int row, const auto& loader_b, int col) {
                  loop.produce(loader_a, loader_b, Tile::kStageBytes, row, col, tile.k_begin,
                               tile.k_end, cursor);
                });
    }
  }
};

// fprop with K-major weights, dgrad with MN-major ones.
struct WindowOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    constexpr bool kFprop = Tile::kMajorB == Major::kK;
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      int group, col_in_group;
      by_group.divmod(col, group, col_in_group);
      const int channel = group * group_channels;
      load(WindowLoader<Tile::kBlkM>{&a, taps, windows.place(row), channel}, row,
           WeightLoader<Tile::kMajorB, Tile::kBlkN>{&b, taps, channel},
           kFprop ? col : col_in_group);
    });
  }
};

// The same products with D transposed: A is the weights, B the windows.
struct SwappedWindowOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    constexpr bool kFprop = Tile::kMajorA == Major::kK;
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      int group, row_in_group;
      by_group.divmod(row, group, row_in_group);
      const int channel = group * group_channels;
      load(WeightLoader<Tile::kMajorA, Tile::kBlkM>{&a, taps, channel}, kFprop ? row : row_in_group,
           WindowLoader<Tile::kBlkN>{&b, taps, windows.place(col), channel}, col);
    });
  }
};

// wgrad.
struct WindowColumnOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      const int channel = by_group.quotient(row) * group_channels;
      load(TmaLoaderA<Tile>{&a}, row, WindowColumnLoader<Tile::kBlkN>{&b, taps, windows, channel},
           col);
    });
  }
};

}  // namespace warpwright
