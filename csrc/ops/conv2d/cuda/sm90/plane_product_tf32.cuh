// fprop and dgrad of plane_product.cuh in TF32. wgmma reads 32-bit operands along k only, so the
// kernel computes D^T: its A is the planes, which pass through registers
// (tile/mn_major_tf32_sm90.cuh), and its B the weights, K-major. dgrad has a copy of them, (C, K).
#pragma once

#include "ops/conv2d/cuda/sm90/plane_product.cuh"

namespace warpwright {

// by_group: rows of D per image.
struct PlanePixelsOperandsTf32 : ConvOperandsSm90 {
  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int, unsigned first,
                                          unsigned stride) const {
    produce_tiles<Tile>(loop, p, first, stride, [&](int row, int col, const auto& load) {
      int image, channel;
      by_group.divmod(col, image, channel);
      load(PlanePixelsLoader<Tile::kBlkM, Tile::kBlkK>{&a, image}, row, TmaLoaderB<Tile>{&b},
           channel);
    });
  }
};

// The tile's columns are channels of one image.
template <int kBlocks>
struct ImageColumnsEpilogue : TransposedEpilogue<kBlocks> {
  using Output = ImageRowsOutput;
  using Base = TransposedEpilogue<kBlocks>;

  // first_row, first_col: of D.
  template <int kRegs>
  __device__ __forceinline__ static void store(float (&d)[kBlocks][kRegs],
                                               const typename Base::Bias& bias,
                                               const ImageRowsOutput& output, int64_t split,
                                               int first_row, int first_col) {
    if (output.row_bias != nullptr) {
      int image, channel;
      output.by_image.divmod(first_row, image, channel);
      const float* source =
          static_cast<const float*>(output.row_bias) + channel + accumulator_col();
#pragma unroll
      for (int i = 0; i < kRegs; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = source[i * 2 + e];
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            d[block][i + e] += value;
            d[block][i + e + 2] += value;
          }
        }
      }
    }
    Base::store(d, bias, output, split, first_row, first_col);
  }
};

inline void launch_plane_product_tf32(const Conv2dShape& s, const PlaneProductConfig& config,
                                      const void* planes, const void* weight, const void* bias,
                                      void* d, cudaStream_t stream) {
  const bool fprop = config.direction == ConvDirection::kFprop;
  const int64_t rows = plane_product_rows(config.direction, s), depth = fprop ? s.c : s.k;
  const ConvPart part = plane_product_part(config.direction, s);
  const GemmParams product = conv_product(s, part.m, part.n, depth, d);
  GemmParams weights = conv_product(s, part.n, rows, depth, nullptr);
  weights.b = make_operand(weight, s.dtype, depth, 1);
  GemmPlan plan{};
  plan.variant = GemmVariant::kSm90;
  plan.splits = plan.cluster = 1;
  const ImageRowsOutput output = image_rows_output<float>(product, plan, bias, rows);
  const auto launch_tile = [&]<TmaIm2colTile kTile>() {
    constexpr Sm90TileShape kShape = tma_im2col_tile(kTile);
    using Tile = TileSm90<float, kShape.blk_n, kShape.blk_m, kShape.stages, kShape.ping_pong, false,
                          Major::kMN, Major::kK>;
    PlanePixelsOperandsTf32 operands{};
    operands.a = planes_map(s, planes, depth, Tile::kBlkK);
    operands.b = operand_map_b<Tile>(weights);
    operands.by_group = FastDivmod(rows);
    launch_sm90_product<Tile, ImageColumnsEpilogue<Tile::kBlocks>>(product, plan, operands, output,
                                                                   nullptr, stream);
  };
  config.tile == TmaIm2colTile::k128x128
      ? launch_tile.template operator()<TmaIm2colTile::k128x128>()
      : launch_tile.template operator()<TmaIm2colTile::k64x128>();
}

}  // namespace warpwright
