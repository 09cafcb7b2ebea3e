// The 8-bit product on the sm_90a kernel: its parameters, tile by tile.
#pragma once

#include <stdexcept>
#include <utility>

#include "gemm/sm90.cuh"
#include "ops/linear_8bit/cuda/launch.h"
#include "ops/linear_8bit/linear_8bit.h"
#include "tile/epilogue_8bit_sm90.cuh"
#include "tile/mainloop_8bit_sm90.cuh"

namespace warpwright {

inline Output8BitSm90 output_8bit(const Product8BitParams& p, const Product8BitPlan& plan) {
  Output8BitSm90 output{};
  output.type = p.type;
  output.row_scale = p.row_scale;
  output.col_scale = p.col_scale;
  output.scales_rows = p.scales_rows;
  output.scales_cols = p.scales_cols;
  output.bias = p.bias;
  output.bias_type = p.bias_type;
  output.d = p.d;
  output.m = static_cast<int>(p.m);
  output.n = static_cast<int>(p.n);
  output.pitch = p.n;
  output.fp32 = dtype_size(p.type) == 4;
  output.pairs = plan.pair_stores;
  output.use_tma = plan.tma_stores;
  if (output.use_tma) output.map = make_tensor_map({p.type, false, p.d, p.n, p.m, p.n, 64, 64});
  return output;
}

template <class Tile, class Store = Epilogue8BitSm90<Tile::kStoreBuffers, Tile::kTight>>
void launch_product_8bit_tile(const Product8BitParams& p, const Product8BitPlan& plan,
                              cudaStream_t stream) {
  GemmParams product{};
  product.m = p.m;
  product.n = p.n;
  product.k = p.k;
  product.a = make_operand(p.a, DType::kUInt8, p.a_pitch, 1);
  product.b = make_operand(p.b, DType::kUInt8, p.b_pitch, 1);
  GemmPlan whole{};
  whole.splits = 1;
  whole.cluster = 1;
  launch_sm90_product<Tile, Store>(product, whole, tma_operands<Tile, TmaOperands>(product),
                                   output_8bit(p, plan), nullptr, stream);
}

// Instantiated in instances/, one kind of sums per file. T: int8_t or fp8_e4m3.
template <class T, bool kPromotes>
void launch_product_8bit_sm90(const Product8BitParams& p, const Product8BitPlan& plan,
                              cudaStream_t stream) {
  auto launches = [&]<int kIndex>() {
    constexpr auto kTile = static_cast<Product8BitTile>(kIndex);
    constexpr Product8BitShape kShape = product_8bit_shape(kTile, kPromotes);
    if constexpr (kShape.stages > 0) {
      if (plan.tile != kTile) return false;
      launch_product_8bit_tile<Tile8Bit<T, T, kShape.blk_m, kShape.blk_n, kShape.stages,
                                        kShape.ping_pong, kPromotes, kShape.store_buffers>>(p, plan,
                                                                                            stream);
      return true;
    } else {
      return false;
    }
  };
  auto launches_one_of = [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    return (launches.template operator()<kIndex>() || ...);
  };
  if (!launches_one_of(std::make_integer_sequence<int, kProduct8BitTiles>())) {
    throw std::logic_error("warpwright: 8-bit product: the plan names no tile");
  }
}

}  // namespace warpwright
