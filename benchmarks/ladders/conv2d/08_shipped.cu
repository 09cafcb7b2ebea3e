// Shipped: the library's kernel for most layers, a loader of windows for the matrix product.
// Why: any channels, strides, dilations and images run on the one warp-specialised product. Here
// its tile is y^T of 64 filters by 256 pixels, as in rung 7. Today conv2d walks in this layer.
// Bound: shared memory, which TMA fills while wgmma reads it: every tap of x passes it again.
#include "ladder.cuh"
#include "ops/conv2d/cuda/sm90/launch.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // Conv2dShape, TmaIm2colConfig, WindowProduct

constexpr auto kFprop = ConvDirection::kFprop;
constexpr auto kTransposed = TmaIm2colTile::kTransposed;
using Tile = ConvTileOf<kFprop, warpwright::bf16, kTransposed>::type;

Conv2dShape shape_of(const Conv& c) {
  Conv2dShape s{};
  s.dtype = DType::kBFloat16;
  s.channels_last = s.sm90 = true;
  s.n = c.images;
  s.c = s.k = kChannels;
  s.h = s.w = s.p = s.q = c.side;
  s.r = s.s = 3;
  s.stride_h = s.stride_w = s.pad_h = s.pad_w = s.dilation_h = s.dilation_w = s.groups = 1;
  return s;
}

}  // namespace

const Rung kRung = {Tile::kBlkN, Tile::kStages, Tile::kThreads,
                    1024 + MainloopSm90<Tile>::kSmemBytes +
                        Tile::kConsumers* EpilogueSm90<warpwright::bf16>::kSmemBytes};

void launch_rung(const Conv& c) {
  const Conv2dShape s = shape_of(c);
  TmaIm2colConfig config{.direction = kFprop, .kind = GemmKind::k16Bit, .tile = kTransposed};
  config.splits = 1;
  for_each_part(kFprop, s, [&](const ConvPart& part) {
    WindowProduct windows{
        s, part, kFprop, c.x, c.w, conv_product(s, part.m, part.n, part.k_tiles * kConvChunk, c.y)};
    windows.product.bias = c.bias;
    windows.launch<kTransposed, Tile>(conv_product_plan(config), c.stream);
  });
}

}  // namespace ladder
