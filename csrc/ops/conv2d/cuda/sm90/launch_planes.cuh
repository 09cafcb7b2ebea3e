// The launch of the products whose D is stored in planes.
#pragma once

#include "ops/conv2d/cuda/layout/change.h"
#include "ops/conv2d/cuda/sm90/launch.cuh"
#include "ops/conv2d/cuda/sm90/planes.cuh"
#include "ops/conv2d/cuda/sm90/planes_fp32.cuh"

namespace warpwright {

template <class T>
PlanesOutput planes_output(const GemmParams& p, int64_t plane) {
  PlanesOutput output{};
  output.d = p.d;
  output.bias = p.bias;
  output.bias_pairs = p.n % 2 == 0 && reinterpret_cast<uintptr_t>(p.bias) % (2 * sizeof(T)) == 0;
  output.m = static_cast<int>(p.m);
  output.n = static_cast<int>(p.n);
  output.by_plane = FastDivmod(plane);
  output.image = p.n * plane;
  output.vector = plane_vector(plane, reinterpret_cast<uintptr_t>(p.d), sizeof(T));
  return output;
}

template <ConvDirection kDirection, class T>
void launch_planes_of(const WindowProduct& windows, const TmaIm2colConfig& config,
                      cudaStream_t stream) {
  const WindowAxes& axes = windows.part.windows;
  const PlanesOutput output = planes_output<T>(windows.product, axes[0].windows * axes[1].windows);
  const GemmPlan plan = conv_product_plan(config);
  for_tma_im2col_tile<kDirection, T>(config, [&]<TmaIm2colTile kTile, class Tile>() {
    if constexpr (kTile == TmaIm2colTile::kTransposed) {
      GemmParams transposed = windows.product;
      std::swap(transposed.m, transposed.n);
      launch_sm90_product<Tile, TransposedPlanesEpilogue<T>>(
          transposed, plan, windows.operands<SwappedWindowOperands>(Tile::kBlkN, Tile::kBlkM),
          output, nullptr, stream);
    } else {
      launch_sm90_product<Tile, PlanesEpilogue<T>>(
          windows.product, plan, windows.operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN), output,
          nullptr, stream);
    }
  });
}

template <class T>
void launch_tma_im2col_planes(const Conv2dShape& s, const TmaIm2colConfig& config,
                              const void* pixels, const void* weight, const void* bias, void* d,
                              cudaStream_t stream) {
  for_each_part(config.direction, s, [&](const ConvPart& part) {
    WindowProduct windows{
        s,      part,   config.direction,
        pixels, weight, conv_product(s, part.m, part.n, part.k_tiles * conv_chunk(s.dtype), d)};
    windows.product.bias = bias;
    config.direction == ConvDirection::kFprop
        ? launch_planes_of<ConvDirection::kFprop, T>(windows, config, stream)
        : launch_planes_of<ConvDirection::kDgrad, T>(windows, config, stream);
  });
}

}  // namespace warpwright
