// The gradients of x and the weight from a gradient of y whose pixels have a pitch: conv2d's sm_90a
// kernels (ops/conv2d/cuda/sm90/launch.cuh) with another tensor map of the windows.
#pragma once

#include "host/tensor_map_pitched.h"
#include "ops/conv2d/cuda/sm90/launch.cuh"
#include "ops/conv_transpose2d/cuda/launch.h"

namespace warpwright {

inline CUtensorMap pitched_windows_map(const ConvTranspose2dBackwardParams& p, int box_pixels) {
  const Conv2dShape& s = p.shape;
  const auto& [height, width] = window_axes(s);
  TensorMapIm2col map{};
  map.dtype = s.dtype;
  map.pointer = p.grad_output;
  map.batch = s.n;
  map.channels = s.c;
  map.size[0] = height.size, map.size[1] = width.size;
  map.windows[0] = height.windows, map.windows[1] = width.windows;
  map.stride[0] = static_cast<int>(height.stride), map.stride[1] = static_cast<int>(width.stride);
  map.padding[0] = static_cast<int>(height.pad), map.padding[1] = static_cast<int>(width.pad);
  map.box_channels = static_cast<int>(kConvChunk);
  map.box_pixels = box_pixels;
  return make_pitched_im2col_tensor_map(map, p.pitch);
}

template <class T>
void launch_pitched_input_gradient(const ConvTranspose2dBackwardParams& p,
                                   const TmaIm2colConfig& config, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const GemmPlan plan = conv_product_plan(config);
  for_tma_im2col_tile<ConvDirection::kFprop, T>(config, [&]<TmaIm2colTile kTile, class Tile>() {
    for_each_part(config.direction, s, [&](const ConvPart& part) {
      const WindowProduct windows{
          s,
          part,
          config.direction,
          p.grad_output,
          p.weight,
          conv_product(s, part.m, part.n, part.k_tiles * kConvChunk, p.grad_input)};
      if constexpr (kTile == TmaIm2colTile::kTransposed) {
        GemmParams transposed = windows.product;
        std::swap(transposed.m, transposed.n);
        auto operands = windows.template operands<SwappedWindowOperands>(Tile::kBlkN, Tile::kBlkM);
        operands.b = pitched_windows_map(p, Tile::kBlkN);
        launch_sm90_product<Tile, TransposedRowsEpilogue<T>>(
            transposed, plan, operands, sm90_output<T>(windows.product, plan, nullptr), nullptr,
            stream);
      } else {
        auto operands = windows.template operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN);
        operands.a = pitched_windows_map(p, Tile::kBlkM);
        launch_sm90_kernel<Tile>(windows.product, plan, operands, nullptr, stream);
      }
    });
  });
}

template <class T>
void launch_pitched_weight_gradient(const ConvTranspose2dBackwardParams& p,
                                    const TmaIm2colConfig& config, void* workspace,
                                    cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const WindowImage image{p.grad_output, s.n, s.c, window_axes(s)};
  GemmParams product = conv_product(s, s.k, s.taps() * s.c, s.n * s.p * s.q, p.grad_weight);
  product.a = make_operand(p.input, s.dtype, 1, s.k);
  for_tma_im2col_tile<ConvDirection::kWgrad, T>(config, [&]<TmaIm2colTile, class Tile>() {
    WindowColumnOperands operands{};
    operands.a = operand_map_a<Tile>(product);
    operands.b = pitched_windows_map(p, static_cast<int>(kConvChunk));
    set_geometry(operands, s, image, s.group_k());
    launch_sm90_kernel<Tile>(product, conv_product_plan(config), operands, workspace, stream);
  });
}

}  // namespace warpwright
