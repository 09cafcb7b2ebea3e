// From a convolution to the sm_90a matrix product: tensor maps, geometry and the product's extents.
#pragma once

#include "host/tensor_map.h"
#include "ops/conv2d/cuda/sm90/epilogues.cuh"
#include "ops/conv2d/cuda/sm90/epilogues_fp32.cuh"
#include "ops/conv2d/cuda/sm90/launch.h"
#include "ops/conv2d/cuda/sm90/operands.cuh"

namespace warpwright {

// The image whose windows are read: x, or dy for dgrad.
struct WindowImage {
  const void* pixels;
  int64_t batch;
  int64_t channels;
  WindowAxes axes;
  int64_t pitch = 0;  // elements between pixels; 0: channels
};

inline CUtensorMap windows_map(DType dtype, const WindowImage& image, int box_pixels) {
  const auto& [height, width] = image.axes;
  TensorMapIm2col map{};
  map.dtype = dtype;
  map.round_to_tf32 = dtype == DType::kFloat32;
  map.pointer = image.pixels;
  map.batch = image.batch;
  map.channels = image.channels;
  map.pitch = image.pitch;
  map.size[0] = height.size, map.size[1] = width.size;
  map.windows[0] = height.windows, map.windows[1] = width.windows;
  map.stride[0] = static_cast<int>(height.stride), map.stride[1] = static_cast<int>(width.stride);
  map.padding[0] = static_cast<int>(height.pad), map.padding[1] = static_cast<int>(width.pad);
  map.box_channels = static_cast<int>(conv_chunk(dtype));
  map.box_pixels = box_pixels;
  return make_im2col_tensor_map(map);
}

// Boxes of 64 (TF32: 32) channels by box_rows filters of one tap. `transposed`: of as many filters
// by box_rows channels of one tap.
inline CUtensorMap weight_map(const Conv2dShape& s, const void* weight, int box_rows,
                              bool transposed = false) {
  TensorMapRows map{};
  map.dtype = s.dtype;
  map.pointer = weight;
  map.cols = transposed ? s.group_k() : s.group_c();
  map.extent[0] = transposed ? s.c : s.k, map.extent[1] = s.taps(), map.extent[2] = 1;
  map.stride[0] = s.taps() * map.cols, map.stride[1] = map.cols;
  map.box_rows = box_rows;
  return make_rows_tensor_map(map);
}

// `group`: columns of D per group, or rows for wgrad.
template <class Operands>
void set_geometry(Operands& operands, const Conv2dShape& s, const WindowImage& image,
                  int64_t group) {
  const auto& [height, width] = image.axes;
  const int64_t group_channels = image.channels / s.groups;
  const int64_t chunks = ceil_div(group_channels, conv_chunk(s.dtype));
  operands.windows = {.by_q = FastDivmod(width.windows),
                      .by_pq = FastDivmod(height.windows * width.windows),
                      .stride_h = static_cast<int>(height.stride),
                      .stride_w = static_cast<int>(width.stride),
                      .pad_h = static_cast<int>(height.pad),
                      .pad_w = static_cast<int>(width.pad)};
  operands.taps = {.by_chunks = FastDivmod(chunks),
                   .by_s = FastDivmod(width.taps),
                   .chunks = static_cast<int>(height.taps * width.taps * chunks),
                   .dilation_h = static_cast<int>(height.dilation),
                   .dilation_w = static_cast<int>(width.dilation),
                   .first_tap = static_cast<int>(height.first_tap * s.s + width.first_tap),
                   .row_step = static_cast<int>(height.tap_step * s.s),
                   .col_step = static_cast<int>(width.tap_step)};
  operands.by_group = FastDivmod(group);
  operands.group_channels = static_cast<int>(group_channels);
}

// Extents and result of the product, for the launch of the sm_90a kernel.
inline GemmParams conv_product(const Conv2dShape& s, int64_t m, int64_t n, int64_t k, void* d) {
  GemmParams p{};
  p.m = m, p.n = n, p.k = k;
  p.a.dtype = p.b.dtype = s.dtype;
  p.tf32 = s.allow_tf32;
  p.d = d;
  p.sm90 = true;
  return p;
}

inline GemmPlan conv_product_plan(const TmaIm2colConfig& config) {
  GemmPlan plan{};
  plan.variant = GemmVariant::kSm90;
  plan.splits = config.splits;
  plan.cluster = 1;
  plan.sums_rows = config.sums_bias;
  return plan;
}

template <class T>
constexpr GemmKind kConvKind = sizeof(T) == 4 ? GemmKind::kTf32 : GemmKind::k16Bit;

// The tile of a direction's kernel. wgrad in TF32 computes dw^T. dgrad in TF32 has K-major weights.
template <ConvDirection kDirection, class T, TmaIm2colTile kTile>
struct ConvTileOf {
  static constexpr Sm90TileShape kShape = tma_im2col_tile(kTile);
  static constexpr bool kTf32 = kConvKind<T> == GemmKind::kTf32;
  static constexpr bool kWgrad = kDirection == ConvDirection::kWgrad;
  static constexpr bool kSwaps = kWgrad && kTf32;
  static constexpr bool kTransposed = kTile == TmaIm2colTile::kTransposed;
  static constexpr Major kWindows = kWgrad ? Major::kMN : Major::kK;
  static constexpr Major kWeights =
      kDirection == ConvDirection::kFprop || (kTf32 && !kWgrad) ? Major::kK : Major::kMN;
  using type =
      TileSm90<T, kSwaps ? kShape.blk_n : kShape.blk_m, kSwaps ? kShape.blk_m : kShape.blk_n,
               kShape.stages, kShape.ping_pong, false, kTransposed ? kWeights : kWindows,
               kTransposed ? kWindows : kWeights>;
};

// Calls launch.operator()<kTile, Tile>() with the tile of the config.
template <ConvDirection kDirection, class T, class Launch>
void for_tma_im2col_tile(const TmaIm2colConfig& config, Launch&& launch) {
  auto launches = [&]<TmaIm2colTile kTile>() {
    if constexpr (has_tma_im2col_tile(kDirection, kTile, kConvKind<T>)) {
      if (config.tile != kTile) return false;
      launch.template operator()<kTile, typename ConvTileOf<kDirection, T, kTile>::type>();
      return true;
    } else {
      return false;
    }
  };
  using enum TmaIm2colTile;
  const bool found =
      launches.template operator()<k256x128>() || launches.template operator()<k128x256>() ||
      launches.template operator()<k128x128>() || launches.template operator()<k128x64>() ||
      launches.template operator()<k64x192>() || launches.template operator()<k64x128>() ||
      launches.template operator()<kTransposed>();
  if (!found) throw std::logic_error("warpwright: conv2d: the plan names no sm_90a tile");
}

// A part of fprop or dgrad: D (pixels, channels) from windows of `pixels`.
struct WindowProduct {
  const Conv2dShape& shape;
  ConvPart part;
  ConvDirection direction;
  const void* pixels;
  const void* weight;
  GemmParams product;
  int64_t pitch = 0;  // of the pixels, as in WindowImage

  // A and B are the windows and the weights, or for a transposed D the reverse.
  template <class Operands>
  Operands operands(int window_rows, int weight_rows) const {
    const bool fprop = direction == ConvDirection::kFprop;
    const WindowImage image{pixels, shape.n, fprop ? shape.c : shape.k, part.windows, pitch};
    const CUtensorMap windows = windows_map(shape.dtype, image, window_rows);
    // In TF32 dgrad has the weights (C, RS, K).
    const bool transposed = !fprop && shape.dtype == DType::kFloat32, k_major = fprop || transposed;
    const int box_rows = k_major ? cut_box(weight_rows, product.n) : static_cast<int>(kConvChunk);
    const CUtensorMap weights = weight_map(shape, weight, box_rows, transposed);
    constexpr bool kSwapped = std::is_same_v<Operands, SwappedWindowOperands>;
    Operands operands{};
    operands.a = kSwapped ? weights : windows;
    operands.b = kSwapped ? windows : weights;
    if (k_major) operands.missing_rows = weight_rows - box_rows;
    set_geometry(operands, shape, image, fprop ? shape.group_k() : shape.group_c());
    return operands;
  }

  // D of dense rows.
  template <TmaIm2colTile kTile, class Tile>
  void launch(const GemmPlan& plan, cudaStream_t stream) const {
    using T = typename Tile::Element;
    if constexpr (kTile == TmaIm2colTile::kTransposed) {
      GemmParams transposed = product;
      std::swap(transposed.m, transposed.n);
      launch_sm90_product<Tile, TransposedRowsEpilogue<T>>(
          transposed, plan, operands<SwappedWindowOperands>(Tile::kBlkN, Tile::kBlkM),
          sm90_output<T>(product, plan, nullptr), nullptr, stream);
    } else {
      launch_sm90_kernel<Tile>(product, plan, operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN),
                               nullptr, stream);
    }
  }
};

template <class T>
void launch_tma_im2col_fprop(const Conv2dParams& params, const TmaIm2colConfig& config,
                             cudaStream_t stream) {
  const Conv2dShape& s = params.shape;
  if (config.stores_planes) {
    return launch_tma_im2col_planes<T>(s, config, params.input, params.weight, params.bias,
                                       params.output, stream);
  }
  for_tma_im2col_tile<ConvDirection::kFprop, T>(config, [&]<TmaIm2colTile kTile, class Tile>() {
    for_each_part(config.direction, s, [&](const ConvPart& part) {
      WindowProduct windows{
          s,
          part,
          config.direction,
          params.input,
          params.weight,
          conv_product(s, part.m, part.n, part.k_tiles * conv_chunk(s.dtype), params.output),
          params.input_pitch};
      windows.product.bias = params.bias;
      windows.template launch<kTile, Tile>(conv_product_plan(config), stream);
    });
  });
}

// The output for dx. Except for the phases, its strides are those of a dense NHWC image.
template <class T>
PhaseOutput phase_output(const Conv2dShape& s, const ConvPart& part, void* dx) {
  const int64_t pitch = s.w * s.c;
  return {.d = static_cast<T*>(dx) + part.phase_h * pitch + part.phase_w * s.c,
          .m = static_cast<int>(part.m),
          .n = static_cast<int>(part.n),
          .by_w = FastDivmod(part.windows[1].windows),
          .by_hw = FastDivmod(part.windows[0].windows * part.windows[1].windows),
          .stride_n = s.h * pitch,
          .stride_h = s.stride_h * pitch,
          .stride_w = s.stride_w * s.c};
}

template <class T>
void launch_tma_im2col_dgrad(const Conv2dBackwardParams& params, const TmaIm2colConfig& config,
                             cudaStream_t stream) {
  const Conv2dShape& s = params.shape;
  if (config.stores_planes) {
    return launch_tma_im2col_planes<T>(s, config, params.grad_output, params.weight, nullptr,
                                       params.grad_input, stream);
  }
  const int64_t phases = s.stride_h * s.stride_w;
  int64_t parts = 0;
  for_each_part(config.direction, s, [&](const ConvPart&) { ++parts; });
  if (parts < phases) {
    cuda_check(cudaMemsetAsync(params.grad_input, 0,
                               static_cast<size_t>(s.n * s.h * s.w * s.c) * sizeof(T), stream),
               "cudaMemsetAsync");
  }
  for_tma_im2col_tile<ConvDirection::kDgrad, T>(config, [&]<TmaIm2colTile kTile, class Tile>() {
    const GemmPlan plan = conv_product_plan(config);
    int64_t launched = 0;
    for_each_part(config.direction, s, [&](const ConvPart& part) {
      WindowProduct windows{
          s,
          part,
          config.direction,
          params.grad_output,
          params.weight,
          conv_product(s, part.m, part.n, part.k_tiles * conv_chunk(s.dtype), params.grad_input)};
      if constexpr (kTile != TmaIm2colTile::kTransposed) {
        if (phases > 1) {
          windows.product.overlap = {.next = launched + 1 < parts, .previous = launched > 0};
          ++launched;
          return launch_sm90_product<Tile, PhaseEpilogue<T>>(
              windows.product, plan,
              windows.template operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN),
              phase_output<T>(s, part, params.grad_input), nullptr, stream);
        }
      }
      windows.template launch<kTile, Tile>(plan, stream);
    });
  });
}

template <class T>
void launch_tma_im2col_wgrad(const Conv2dBackwardParams& params, const TmaIm2colConfig& config,
                             void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = params.shape;
  const WindowImage image{params.input, s.n, s.c, window_axes(s), params.input_pitch};
  GemmParams product =
      conv_product(s, s.k, s.taps() * s.group_c(), s.n * s.p * s.q, params.grad_weight);
  product.a = make_operand(params.grad_output, s.dtype, 1, s.k);
  product.row_sums = params.grad_bias;
  product.accum_d = params.float32_parameters;
  const int box_pixels = static_cast<int>(conv_chunk(s.dtype));
  for_tma_im2col_tile<ConvDirection::kWgrad, T>(config, [&]<TmaIm2colTile, class Tile>() {
    auto launch_with = [&](auto operands, const CUtensorMap& a, const CUtensorMap& b) {
      operands.a = a;
      operands.b = b;
      set_geometry(operands, s, image, s.group_k());
      launch_sm90_kernel<Tile>(product, conv_product_plan(config), operands, workspace, stream);
    };
    const CUtensorMap windows = windows_map(s.dtype, image, box_pixels);
    if constexpr (Tile::kMnMajorTf32) {
      const GemmParams swapped = swapped_operands(product);
      launch_with(RewrittenWindowColumnOperands{}, windows, operand_map_b<Tile>(swapped));
    } else {
      launch_with(WindowColumnOperands{}, operand_map_a<Tile>(product), windows);
    }
  });
}

}  // namespace warpwright
