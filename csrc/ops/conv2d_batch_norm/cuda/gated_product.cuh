// The launch of the product of gated_dgrad.h.
#pragma once

#include "ops/conv2d/cuda/sm90/join.cuh"
#include "ops/conv2d_batch_norm/cuda/gating_epilogue_sm90.cuh"
#include "ops/conv2d_batch_norm/cuda/product.h"

namespace warpwright {

inline AddendPixels addend_pixels(const GatedDgradParams& p) {
  const Conv2dShape& s = p.conv.shape;
  const auto [stride_h, stride_w] = p.addend_stride;
  return {.pixels = p.conv.addend,
          .by_w = FastDivmod(s.w),
          .by_hw = FastDivmod(s.h * s.w),
          .by_stride_h = FastDivmod(stride_h),
          .by_stride_w = FastDivmod(stride_w),
          .height = static_cast<int>(ceil_div(s.h, stride_h)),
          .width = static_cast<int>(ceil_div(s.w, stride_w))};
}

// All but the addend.
template <class T, class Addend>
GatingOutput<Addend> gating_output(const GatedDgradParams& p, const GatedDgradPlan& plan,
                                   const GemmParams& product, const GemmPlan& gemm,
                                   void* workspace) {
  GatingOutput<Addend> output{};
  static_cast<OutputSm90&>(output) = sm90_output<T>(product, gemm, nullptr);
  output.input = map_like_d<T>(product, gemm, p.norm_input);
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
  auto launch_with = [&]<class Addend>(const Addend& addend) {
    GatingOutput<Addend> output = gating_output<T, Addend>(p, plan, product, gemm, workspace);
    output.addend = addend;
    launch_sm90_product<Tile, GatingEpilogue<T, Tile::kBlocks, Tile::kBlkN, Addend>>(
        product, gemm, tma_operands<Tile, TmaOperands>(product), output, nullptr, stream);
  };
  const bool is_matrix = p.addend_stride[0] == 1 && p.addend_stride[1] == 1;
  is_matrix ? launch_with(AddendBoxes{map_like_d<T>(product, gemm, p.conv.addend)})
            : launch_with(addend_pixels(p));
}

}  // namespace warpwright
