// The launch of the product of gated_dgrad.h.
#pragma once

#include "ops/conv2d/cuda/sm90/join.cuh"
#include "ops/conv2d_batch_norm/cuda/gating_epilogue_sm90.cuh"
#include "ops/conv2d_batch_norm/cuda/product.h"

namespace warpwright {

template <class T>
GatingOutput gating_output(const GatedDgradParams& p, const GatedDgradPlan& plan,
                           const GemmParams& product, const GemmPlan& gemm, void* workspace) {
  GatingOutput output{};
  static_cast<JoiningOutput&>(output) = joining_output<T>(product, gemm, p.conv.addend);
  output.input = joining_output<T>(product, gemm, p.norm_input).addend;
  output.mask = static_cast<const uint8_t*>(p.mask);
  output.mean = static_cast<const float*>(p.mean);
  output.moments = static_cast<float2*>(workspace);
  output.records =
      reinterpret_cast<MomentsRecord*>(output.moments + plan.records() * GatedDgradPlan::kColumns);
  return output;
}

template <class T>
void launch_gated_product(const GatedDgradParams& p, const GatedDgradPlan& plan, void* workspace,
                          cudaStream_t stream) {
  constexpr Sm90TileShape kShape = kGatedDgradTile;
  using Tile = TileSm90<T, kShape.blk_m, kShape.blk_n, kShape.stages, kShape.ping_pong, false,
                        Major::kK, Major::kMN>;
  GemmParams product = conv2d_product(
      ConvDirection::kDgrad, p.conv.shape,
      {address_of(p.conv.grad_input), address_of(p.conv.weight), address_of(p.conv.grad_output)});
  product.overlap.next = true;  // the merge
  const GemmPlan gemm = conv_product_plan({.splits = 1});
  launch_sm90_product<Tile, GatingEpilogue<T, Tile::kBlocks, Tile::kBlkN>>(
      product, gemm, tma_operands<Tile, TmaOperands>(product),
      gating_output<T>(p, plan, product, gemm, workspace), nullptr, stream);
}

}  // namespace warpwright
