// How the operands of a convolution's three products reach the stages of the sm_90a matrix product
// (gemm/kernel_sm90.cuh), for dense NHWC images and KRSC weights. Windows come by TMA's im2col
// mode: a box is 64 channels of consecutive output pixels at one filter tap. Padding reads as zero.
//
//   product  D               A (M side)                      B (N side)                k runs over
//   fprop    y (NPQ, K)      windows of x                    w, K-major                taps, C
//   dgrad    dx (NHW, C)     windows of dy, mirrored taps    w, MN-major               taps, K
//   wgrad    dw (K, RS C)    dy, MN-major                    windows of x, MN-major    pixels
//
// TF32: a box is 32 channels. wgmma reads 32-bit operands along k only, so dgrad reads a copy of
// the weights (C, RS, K), K-major, and wgrad computes dw^T: its A is the windows, which pass
// through registers, its B is dy, which a second warpgroup transposes
// (tile/mn_major_tf32_sm90.cuh).
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

// A chunk of channels (128 bytes) under a tap: one k tile of fprop and dgrad, one block of as many
// columns of wgrad.
struct TapGeometry {
  FastDivmod by_chunks;  // per tap
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
  // kChunk: channels.
  template <int kChunk = 64>
  __device__ __forceinline__ Place place(int index) const {
    Place at;
    int tap, chunk, r, s;
    by_chunks.divmod(index, tap, chunk);
    by_s.divmod(tap, r, s);
    at.filter_tap = first_tap + r * row_step + s * col_step;
    at.channel = chunk * kChunk;
    at.offset_h = static_cast<uint16_t>(r * dilation_h);
    at.offset_w = static_cast<uint16_t>(s * dilation_w);
    return at;
  }
};

// kRows windows as the K-major operand of one tile.
template <int kRows, int kChunk = 64>
struct WindowLoader {
  const CUtensorMap* map;
  TapGeometry taps;
  WindowGeometry::Place at;
  int first_channel;  // of the group

  __device__ __forceinline__ void load(uint32_t shared, int, int k_tile, uint32_t barrier) const {
    const TapGeometry::Place tap = taps.place<kChunk>(k_tile);
    tma_load_im2col_4d(shared, map, first_channel + tap.channel, at.w, at.h, at.n, tap.offset_w,
                       tap.offset_h, barrier);
  }
};

// Weights under the k tile's tap: kRows filters, K-major, or kRows channels of 64 filters,
// MN-major.
template <Major kMajor, int kRows, int kChunk = 64>
struct WeightLoader {
  const CUtensorMap* map;
  TapGeometry taps;
  int first_filter;  // MN-major: of the group

  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
    const TapGeometry::Place tap = taps.place<kChunk>(k_tile);
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

// Windows of kChunk pixels as the MN-major operand: kRows columns, each kChunk one tap's channels.
template <int kRows, int kChunk = 64>
struct WindowColumnLoader {
  const CUtensorMap* map;
  TapGeometry taps;
  WindowGeometry windows;
  int first_channel;  // of the group

  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
    const WindowGeometry::Place at = windows.place(k_tile * kChunk);
#pragma unroll
    for (int row = 0; row < kRows; row += kChunk) {
      // Columns past the last are not stored, so their channels do not matter.
      const TapGeometry::Place tap =
          taps.place<kChunk>(min((first_row + row) / kChunk, taps.chunks - 1));
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
  FastDivmod by_group;   // columns of D per group; wgrad: rows
  int group_channels;    // of the image of windows
  int missing_rows = 0;  // of a stage: those that cut_box() leaves out

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
    const int bytes = Tile::kStageBytes - missing_rows * 128;
    for (unsigned block = first; block < p.num_blocks; block += stride) {
      const TileCoord tile = tile_of_block(p.grid, block);
      load_tile(first_m<Tile>(tile), first_n<Tile>(tile, {}),
                [&](const auto& loader_a, int row, const auto& loader_b, int col) {
                  loop.produce(loader_a, loader_b, bytes, row, col, tile.k_begin, tile.k_end,
                               cursor);
                });
    }
  }
};

// fprop with K-major weights, dgrad with MN-major ones, or K-major ones in TF32.
struct WindowOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    constexpr bool kWholeRows = Tile::kMajorB == Major::kK;
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      int group, col_in_group;
      by_group.divmod(col, group, col_in_group);
      const int channel = group * group_channels;
      load(WindowLoader<Tile::kBlkM, Tile::kBlkK>{&a, taps, windows.place(row), channel}, row,
           WeightLoader<Tile::kMajorB, Tile::kBlkN, Tile::kBlkK>{&b, taps, channel},
           kWholeRows ? col : col_in_group);
    });
  }
};

// The same products with D transposed: A is the weights, B the windows.
struct SwappedWindowOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    constexpr bool kWholeRows = Tile::kMajorA == Major::kK;
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      int group, row_in_group;
      by_group.divmod(row, group, row_in_group);
      const int channel = group * group_channels;
      load(WeightLoader<Tile::kMajorA, Tile::kBlkM, Tile::kBlkK>{&a, taps, channel},
           kWholeRows ? row : row_in_group,
           WindowLoader<Tile::kBlkN, Tile::kBlkK>{&b, taps, windows.place(col), channel}, col);
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

// wgrad in TF32: rows of the kernel's tiles are columns of dw. A second warpgroup transposes dy.
struct RewrittenWindowColumnOperands : ConvOperandsSm90 {
  static constexpr int kWarpgroups = RewrittenOperands::kWarpgroups;
  static constexpr int kRegisters = 64;  // 256 * 64 + 256 * 192 = 65536
  static constexpr int kConsumerRegisters = 192;

  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int warpgroup,
                                          unsigned first, unsigned stride) const {
    if (warpgroup == 1) return rewrite_all_stages(loop, p, first, stride);
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      const int channel = by_group.quotient(col) * group_channels;
      load(WindowColumnLoader<Tile::kBlkM, Tile::kBlkK>{&a, taps, windows, channel}, row,
           TmaLoaderB<Tile>{&b}, col);
    });
  }
};

}  // namespace warpwright
