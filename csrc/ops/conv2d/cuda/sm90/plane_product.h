// The configuration of a 1 x 1 convolution of stride 1 in NCHW, without padding and groups, on
// sm_90a. Planes are matrices with contiguous pixels, so each image is a matrix product without a
// copy, if TMA can address its rows.
//   fprop  y_n (K, PQ) = w (K, C) x_n (C, PQ)
//   dgrad  dx_n (C, PQ) = w^T (C, K) dy_n (K, PQ)
//   wgrad  dw (K, C) = sum over images of dy_n (K, PQ) x_n^T (PQ, C)
#pragma once

#include "ops/conv2d/cuda/sm90/config.h"

namespace warpwright {

struct PlaneProductConfig {
  ConvDirection direction;
  GemmKind kind;  // k16Bit or kTf32
  TmaIm2colTile tile;
  int splits;  // wgrad: runs of pixels, summed in order by a second kernel
  int64_t workspace_bytes;
};

constexpr bool has_plane_product_tile(ConvDirection direction, TmaIm2colTile tile) {
  return tile == TmaIm2colTile::k128x128 || tile == TmaIm2colTile::k64x128 ||
         (direction == ConvDirection::kWgrad && tile == TmaIm2colTile::k128x64);
}

// Rows of D per image; a tile is within one image. wgrad: rows of D.
inline int64_t plane_product_rows(ConvDirection direction, const Conv2dShape& s) {
  return direction == ConvDirection::kDgrad ? s.c : s.k;
}

// D (m, n) and its k tiles. fprop and dgrad: D has the rows of all images.
inline ConvPart plane_product_part(ConvDirection direction, const Conv2dShape& s) {
  const int64_t pixels = s.h * s.w, chunk = conv_chunk(s.dtype);
  ConvPart part{};
  if (direction == ConvDirection::kWgrad) {
    part.m = s.k, part.n = s.c, part.k_tiles = s.n * ceil_div(pixels, chunk);
  } else {
    const bool fprop = direction == ConvDirection::kFprop;
    part.m = s.n * (fprop ? s.k : s.c), part.n = pixels;
    part.k_tiles = ceil_div(fprop ? s.c : s.k, chunk);
  }
  return part;
}

inline bool takes_plane_product(ConvDirection direction, const Conv2dShape& s,
                                const Conv2dAddresses& addresses) {
  constexpr int64_t kMaxExtent = int64_t{1} << 30;  // tile coordinates are 32-bit
  if (!s.sm90 || !has_tma_im2col_type(s) || s.channels_last) return false;
  if (s.taps() != 1 || s.stride_h != 1 || s.stride_w != 1 || s.groups != 1) return false;
  if (s.pad_h != 0 || s.pad_w != 0 || s.p != s.h || s.q != s.w) return false;
  // Rows of planes and of weights are whole 16-byte vectors.
  const int64_t vec = 16 / dtype_size(s.dtype);
  const int64_t row = direction == ConvDirection::kDgrad && vec == 4 ? s.k : s.c;
  if (s.h * s.w % vec != 0 || row % vec != 0 || !addresses.are_multiples_of(16)) return false;
  const ConvPart part = plane_product_part(direction, s);
  if (std::max({part.m, part.n, part.k_tiles * conv_chunk(s.dtype)}) > kMaxExtent) return false;
  return direction == ConvDirection::kWgrad || plane_product_rows(direction, s) % 64 == 0;
}

// None if another kernel takes it.
inline std::optional<PlaneProductConfig> choose_plane_product(ConvDirection direction,
                                                              const Conv2dShape& s,
                                                              const Conv2dAddresses& addresses,
                                                              const DeviceInfo& device) {
  if (!takes_plane_product(direction, s, addresses)) return std::nullopt;
  const bool wgrad = direction == ConvDirection::kWgrad;
  const ConvPart part = plane_product_part(direction, s);
  const int64_t part_bytes = s.k * s.c * 4;
  const int64_t most = std::max<int64_t>(
      1, std::min(part.k_tiles / kMinSplitTiles, kMaxTmaIm2colWorkspace / part_bytes));
  PlaneProductConfig config{.direction = direction, .kind = gemm_kind(s)};
  double best = -1;
  for (int t = 0; t < kTmaIm2colTiles; ++t) {
    const auto tile = static_cast<TmaIm2colTile>(t);
    if (!has_plane_product_tile(direction, tile)) continue;
    const Sm90TileShape shape = tma_im2col_tile(tile);
    if (!wgrad && plane_product_rows(direction, s) % shape.blk_m != 0) continue;
    const int64_t tiles = ceil_div(part.m, shape.blk_m) * ceil_div(part.n, shape.blk_n);
    for (int rounds = 0; rounds <= (wgrad ? 4 : 0); ++rounds) {
      const int splits = static_cast<int>(
          wgrad ? std::clamp<int64_t>(rounds * device.num_sms / tiles, 1, most) : 1);
      const double cycles = estimate_part_cycles(part, tile, splits, device);
      if (best >= 0 && cycles >= best) continue;
      best = cycles;
      config.tile = tile;
      config.splits = splits;
      config.workspace_bytes = splits > 1 ? splits * part_bytes : 0;
    }
  }
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape&, const PlaneProductConfig& config) {
  return config.workspace_bytes;
}

inline std::string describe(const PlaneProductConfig& config) {
  const Sm90TileShape shape = tma_im2col_tile(config.tile);
  const bool tf32 = config.kind == GemmKind::kTf32;
  std::string text = std::string("1x1 as a matrix product per image: sm_90a ") +
                     (tf32 ? "TF32" : "16-bit") + " wgmma, tile " +
                     extents(shape.blk_m, shape.blk_n) + " ping-pong, " +
                     std::to_string(shape.stages) + " stages";
  if (config.splits > 1) text += ", split-k " + std::to_string(config.splits);
  return text + " (NCHW with planes of whole 16-byte vectors)";
}

}  // namespace warpwright
