// 1 x 1 convolutions in NCHW as matrix products of planes (plane_product.h). D of fprop and dgrad
// has the rows (image, channel) and the columns pixels, which is the layout of its planes.
#pragma once

#include "ops/conv2d/cuda/sm90/epilogues.cuh"
#include "ops/conv2d/cuda/sm90/launch.cuh"
#include "ops/conv2d/cuda/sm90/plane_product.h"

namespace warpwright {

// kChunk channels by kRows pixels of one image, MN-major: the pixels are contiguous.
template <int kRows, int kChunk = 64>
struct PlanePixelsLoader {
  const CUtensorMap* map;
  int image;

  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
#pragma unroll
    for (int row = 0; row < kRows; row += kChunk) {
      tma_load_4d(shared + row * 128, map, first_row + row, k_tile * kChunk, image, 0, barrier);
    }
  }
};

// Rows of channels by kChunk pixels of one image, K-major. Pixels past an image's last read as
// zero.
template <int kChunk>
struct PlaneChannelsLoader {
  const CUtensorMap* map;
  FastDivmod by_tiles;  // of kChunk pixels, per image

  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
    int image, tile;
    by_tiles.divmod(k_tile, image, tile);
    tma_load_4d(shared, map, tile * kChunk, first_row, image, 0, barrier);
  }
};

// fprop and dgrad: `a` is the map of the weight, `b` that of the planes. by_group: rows per image.
struct PlanePixelsOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      int image, channel;
      by_group.divmod(row, image, channel);
      load(TmaLoaderA<Tile>{&a}, channel, PlanePixelsLoader<Tile::kBlkN>{&b, image}, col);
    });
  }
};

// wgrad: `a` and `b` are the maps of the planes of dy and x. by_group: k tiles per image.
struct PlaneChannelsOperands : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      using Loader = PlaneChannelsLoader<Tile::kBlkK>;
      load(Loader{&a, by_group}, row, Loader{&b, by_group}, col);
    });
  }
};

// The rows' bias: a tile's rows are channels of one image.
struct ImageRowsOutput : OutputSm90 {
  const void* row_bias;  // (rows of an image) or null
  FastDivmod by_image;
};

template <class T>
struct ImageRowsEpilogue : EpilogueSm90<T> {
  using Output = ImageRowsOutput;
  using Base = EpilogueSm90<T>;

  template <int kRegs, class Bias>
  __device__ __forceinline__ void store(float (&d)[kRegs], const Bias& bias,
                                        const ImageRowsOutput& output, int64_t split, int first_row,
                                        int first_col) {
    if (output.row_bias != nullptr) {
      int image, channel;
      output.by_image.divmod(first_row, image, channel);
      add_row_bias<T>(d, static_cast<const T*>(output.row_bias),
                      static_cast<int>(output.by_image.divisor), channel);
    }
    Base::store(d, bias, output, split, first_row, first_col);
  }
};

template <class T>
ImageRowsOutput image_rows_output(const GemmParams& product, const GemmPlan& plan, const void* bias,
                                  int64_t rows) {
  ImageRowsOutput output{};
  static_cast<OutputSm90&>(output) = sm90_output<T>(product, plan, nullptr);
  output.row_bias = bias;
  output.by_image = FastDivmod(rows);
  return output;
}

// The planes (images, channels, pixels), in boxes of 128 bytes of pixels by box_rows channels.
inline CUtensorMap planes_map(const Conv2dShape& s, const void* planes, int64_t channels,
                              int box_rows) {
  const int64_t pixels = s.h * s.w;
  TensorMapRows map{};
  map.dtype = s.dtype;
  map.pointer = planes;
  map.cols = pixels;
  map.extent[0] = channels, map.extent[1] = s.n, map.extent[2] = 1;
  map.stride[0] = pixels, map.stride[1] = channels * pixels;
  map.box_rows = box_rows;
  return make_rows_tensor_map(map);
}

// Calls launch.operator()<Tile>() with the tile of the config.
template <ConvDirection kDirection, class T, Major kMajorA, Major kMajorB, class Launch>
void for_plane_product_tile(const PlaneProductConfig& config, Launch&& launch) {
  auto launches = [&]<TmaIm2colTile kTile>() {
    if constexpr (has_plane_product_tile(kDirection, kTile)) {
      if (config.tile != kTile) return false;
      constexpr Sm90TileShape kShape = tma_im2col_tile(kTile);
      launch.template operator()<TileSm90<T, kShape.blk_m, kShape.blk_n, kShape.stages,
                                          kShape.ping_pong, false, kMajorA, kMajorB>>();
      return true;
    } else {
      return false;
    }
  };
  using enum TmaIm2colTile;
  const bool found = launches.template operator()<k128x128>() ||
                     launches.template operator()<k64x128>() ||
                     launches.template operator()<k128x64>();
  if (!found) throw std::logic_error("warpwright: conv2d: the plan names no tile of planes");
}

template <ConvDirection kDirection, class T>
void launch_plane_product_of(const Conv2dShape& s, const PlaneProductConfig& config,
                             const void* planes, const void* weight, const void* bias, void* d,
                             cudaStream_t stream) {
  constexpr bool kFprop = kDirection == ConvDirection::kFprop;
  constexpr Major kWeight = kFprop ? Major::kK : Major::kMN;
  const int64_t rows = plane_product_rows(kDirection, s), depth = kFprop ? s.c : s.k;
  const ConvPart part = plane_product_part(kDirection, s);
  GemmParams product = conv_product(s, part.m, part.n, part.k_tiles * kConvChunk, d);
  GemmParams weights = conv_product(s, rows, part.n, depth, nullptr);
  weights.a = make_operand(weight, s.dtype, kFprop ? s.c : 1, kFprop ? 1 : s.c);
  GemmPlan plan{};
  plan.variant = GemmVariant::kSm90;
  plan.splits = plan.cluster = 1;
  const ImageRowsOutput output = image_rows_output<T>(product, plan, bias, rows);
  for_plane_product_tile<kDirection, T, kWeight, Major::kMN>(config, [&]<class Tile>() {
    PlanePixelsOperands operands{};
    operands.a = operand_map_a<Tile>(weights);
    operands.b = planes_map(s, planes, depth, kConvChunk);
    operands.by_group = FastDivmod(rows);
    launch_sm90_product<Tile, ImageRowsEpilogue<T>>(product, plan, operands, output, nullptr,
                                                    stream);
  });
}

template <class T>
void launch_plane_product(const Conv2dShape& s, const PlaneProductConfig& config,
                          const void* planes, const void* weight, const void* bias, void* d,
                          cudaStream_t stream) {
  config.direction == ConvDirection::kFprop ? launch_plane_product_of<ConvDirection::kFprop, T>(
                                                  s, config, planes, weight, bias, d, stream)
                                            : launch_plane_product_of<ConvDirection::kDgrad, T>(
                                                  s, config, planes, weight, bias, d, stream);
}

template <class T>
void launch_plane_product_wgrad(const Conv2dBackwardParams& p, const PlaneProductConfig& config,
                                void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const ConvPart part = plane_product_part(ConvDirection::kWgrad, s);
  GemmParams product =
      conv_product(s, part.m, part.n, part.k_tiles * conv_chunk(s.dtype), p.grad_weight);
  product.accum_d = p.float32_parameters;
  GemmPlan plan{};
  plan.variant = GemmVariant::kSm90;
  plan.splits = config.splits;
  plan.cluster = 1;
  for_plane_product_tile<ConvDirection::kWgrad, T, Major::kK, Major::kK>(config, [&]<class Tile>() {
    PlaneChannelsOperands operands{};
    operands.a = planes_map(s, p.grad_output, s.k, Tile::kBlkM);
    operands.b = planes_map(s, p.input, s.c, Tile::kBlkN);
    operands.by_group = FastDivmod(ceil_div(s.h * s.w, conv_chunk(s.dtype)));
    launch_sm90_kernel<Tile>(product, plan, operands, workspace, stream);
  });
}

}  // namespace warpwright
