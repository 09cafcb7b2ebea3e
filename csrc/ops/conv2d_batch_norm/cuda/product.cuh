// The launch of a convolution's sm_90a product with a Store that takes moments.
#pragma once

#include "gemm/sm90.cuh"
#include "ops/conv2d/cuda/row_walk/launch.cuh"
#include "ops/conv2d/cuda/sm90/launch.cuh"
#include "ops/conv2d_batch_norm/cuda/product.h"
#include "ops/conv2d_batch_norm/cuda/transposed_moments.cuh"

namespace warpwright {

inline MomentsRecords moments_records(const Conv2dMomentsPlan& plan, void* workspace) {
  auto* moments = static_cast<float2*>(workspace);
  return {.records = reinterpret_cast<MomentsRecord*>(moments + plan.records() * plan.columns),
          .moments = moments};
}

template <class T>
MomentsOutput moments_output(const GemmParams& product, const GemmPlan& plan,
                             const Conv2dMomentsPlan& moments, void* workspace) {
  return {sm90_output<T>(product, plan, nullptr), moments_records(moments, workspace)};
}

template <GemmTile kTile, class T>
void launch_matrix_moments(const GemmParams& product, const GemmPlan& plan,
                           const MomentsOutput& output, cudaStream_t stream) {
  constexpr Sm90TileShape kShape = sm90_tile(Sm90Loading::kTma, kTile);
  // A stage of 128x128 makes room for two more store buffers: k is short.
  constexpr bool kLarge = kTile == GemmTile::k128x128;
  using Tile = TileSm90<T, kShape.blk_m, kShape.blk_n, kShape.stages - kLarge, kShape.ping_pong,
                        false, Major::kK, Major::kK>;
  launch_sm90_product<Tile, MomentsEpilogue<T, kShape.blk_n, kLarge ? 4 : 2>>(
      product, plan, tma_operands<Tile, TmaOperands>(product), output, nullptr, stream);
}

template <class T>
void launch_product(const Conv2dParams& params, const MatrixProductConfig& config,
                    const Conv2dMomentsPlan& plan, void* workspace, cudaStream_t stream) {
  GemmParams product = conv2d_product(
      ConvDirection::kFprop, params.shape,
      {address_of(params.input), address_of(params.weight), address_of(params.output)});
  product.bias = params.bias;
  product.overlap.next = true;  // the merge
  if (plan.records_per_cta == 1) {
    const MomentsRecords to = moments_records(plan, workspace);
    return launch_short_k_moments<T>(product, config.plan, to.records, to.moments, plan.columns,
                                     stream);
  }
  const MomentsOutput output = moments_output<T>(product, config.plan, plan, workspace);
  config.plan.tile == GemmTile::k128x128
      ? launch_matrix_moments<GemmTile::k128x128, T>(product, config.plan, output, stream)
      : launch_matrix_moments<GemmTile::k64x64, T>(product, config.plan, output, stream);
}

template <TmaIm2colTile kTile, class T>
void launch_window_moments(const WindowProduct& windows, const GemmPlan& plan,
                           const MomentsOutput& output, cudaStream_t stream) {
  constexpr Sm90TileShape kShape = tma_im2col_tile(kTile);
  using Tile = TileSm90<T, kShape.blk_m, kShape.blk_n, kShape.stages, kShape.ping_pong, false,
                        Major::kK, Major::kK>;
  if constexpr (kTile == TmaIm2colTile::kTransposed) {
    GemmParams transposed = windows.product;
    std::swap(transposed.m, transposed.n);
    launch_sm90_product<Tile, TransposedMomentsEpilogue<T>>(
        transposed, plan,
        windows.template operands<SwappedWindowOperands>(Tile::kBlkN, Tile::kBlkM), output, nullptr,
        stream);
  } else {
    launch_sm90_product<Tile, MomentsEpilogue<T, kShape.blk_n>>(
        windows.product, plan, windows.template operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN),
        output, nullptr, stream);
  }
}

template <class T>
void launch_product(const Conv2dParams& params, const TmaIm2colConfig& config,
                    const Conv2dMomentsPlan& plan, void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = params.shape;
  for_each_part(ConvDirection::kFprop, s, [&](const ConvPart& part) {
    WindowProduct windows{
        s,
        part,
        ConvDirection::kFprop,
        params.input,
        params.weight,
        conv_product(s, part.m, part.n, part.k_tiles * kConvChunk, params.output)};
    windows.product.bias = params.bias;
    windows.product.overlap.next = true;  // the merge
    const GemmPlan product = conv_product_plan(config);
    const MomentsOutput output = moments_output<T>(windows.product, product, plan, workspace);
    switch (config.tile) {
      case TmaIm2colTile::k256x128:
        return launch_window_moments<TmaIm2colTile::k256x128, T>(windows, product, output, stream);
      case TmaIm2colTile::k128x128:
        return launch_window_moments<TmaIm2colTile::k128x128, T>(windows, product, output, stream);
      default:
        return launch_window_moments<TmaIm2colTile::kTransposed, T>(windows, product, output,
                                                                    stream);
    }
  });
}

template <class T>
void launch_product(const Conv2dParams& params, const RowWalkConfig& config,
                    const Conv2dMomentsPlan& plan, void* workspace, cudaStream_t stream) {
  launch_row_walk_moments<T>(params, config, moments_records(plan, workspace), stream);
}

template <class T>
void launch_moments_product(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                            void* workspace, cudaStream_t stream) {
  std::visit(
      [&](const auto& config) { launch_product<T>(params, config, plan, workspace, stream); },
      plan.kernel);
}

}  // namespace warpwright
