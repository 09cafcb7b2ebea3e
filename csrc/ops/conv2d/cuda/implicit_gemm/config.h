// The configuration of a convolution's implicit GEMM, which takes any shape in three directions.
// The matrix product's cost model chooses tile and split, with the rates of gathered operands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "gemm/gemm.h"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

struct ImplicitGemmConfig {
  GemmKind kind;
  GemmTile tile;           // k128x128, k128x64, k64x64Gathered or k64x64Elements
  bool vectorized;         // 16-byte gathers along the channels (NHWC)
  bool vectorized_weight;  // of the weights too
  bool vectorized_matrix;  // 16-byte loads of the operand without a gather: w in fprop, dy in wgrad
  bool vectorized_d;       // wgrad: 16-byte stores
  int splits;              // wgrad: runs of pixels, summed in order by a second kernel
  const char* reason;
};

// Whether the pixels of one tile fit 16-bit rows and columns, and 32-bit offsets from each other.
constexpr bool fits_compact_coords(const Conv2dShape& s) {
  constexpr int64_t kMaxExtent = 16000, kTilePixels = 128;
  auto spans = [&](int64_t pixels, int64_t image) {
    return (kTilePixels / std::max<int64_t>(pixels, 1) + 2) * image < (int64_t{1} << 31);
  };
  return s.h + 2 * s.pad_h + s.r * s.dilation_h < kMaxExtent &&
         s.w + 2 * s.pad_w + s.s * s.dilation_w < kMaxExtent && spans(s.p * s.q, s.c * s.h * s.w) &&
         spans(s.h * s.w / (s.stride_h * s.stride_w), s.k * s.p * s.q);
}

// FMA has one tile; the tile that tensor cores would take rates its gathers (gather_rates).
inline TileShape implicit_gemm_tile(GemmKind kind, GemmTile tile) {
  return portable_tile(kind, uses_tensor_cores(kind) ? tile : GemmTile::k64x64Elements);
}

// Estimated cycles of the groups' products (m, n, k) and of the sum over splits, whose parts have
// `part_bytes` each.
inline double estimate_implicit_gemm(const Conv2dShape& s, GemmTile tile, int64_t m, int64_t n,
                                     int64_t k, int splits, double part_bytes,
                                     const DeviceInfo& device) {
  const GemmKind kind = gemm_kind(s);
  const TileShape shape = implicit_gemm_tile(kind, tile);
  const PortableRates rates = gather_rates(kind, tile);
  const int64_t blocks = ceil_div(m, shape.blk_m) * ceil_div(n, shape.blk_n) * s.groups * splits;
  return estimate_portable_cycles(shape, blocks, ceil_div(ceil_div(k, shape.blk_k), splits), rates,
                                  device) +
         estimate_split_cycles(splits, 2.0 * splits * part_bytes, rates);
}

// D (m, n) = A B^T over k, of one group.
struct ImplicitGemmExtents {
  int64_t m, n, k;
};

inline ImplicitGemmExtents implicit_gemm_extents(ConvDirection direction, const Conv2dShape& s) {
  const int64_t depth = s.group_c() * s.taps(), outputs = s.n * s.p * s.q;
  switch (direction) {
    case ConvDirection::kFprop:
      return {outputs, s.group_k(), depth};
    case ConvDirection::kDgrad:
      return {s.n * s.h * s.w, s.group_c(), s.group_k() * s.taps()};
    default:
      return {s.group_k(), depth, outputs};
  }
}

// As many parts of the weight gradient as fill whole waves, stay within 64 MiB and have enough k
// tiles to fill their ring.
inline int choose_wgrad_splits(const Conv2dShape& s, GemmTile tile, const DeviceInfo& device) {
  constexpr int64_t kMostSplits = 264;
  const TileShape shape = implicit_gemm_tile(gemm_kind(s), tile);
  const int64_t depth = s.group_c() * s.taps();
  const int64_t pixels = s.n * s.p * s.q;
  const int64_t bytes = s.k * depth * (s.dtype == DType::kFloat64 ? 8 : 4);
  const int64_t most = std::clamp<int64_t>(
      std::min(ceil_div(pixels, shape.blk_k) / 8, kMaxSplitBytes / std::max<int64_t>(bytes, 1)), 1,
      kMostSplits);
  const int64_t tiles =
      ceil_div(s.group_k(), shape.blk_m) * ceil_div(depth, shape.blk_n) * s.groups;
  double best = -1;
  int best_splits = 1;
  for (int64_t waves = 0; waves <= 8; ++waves) {
    const int64_t blocks = waves * device.num_sms * shape.ctas_per_sm;
    const int splits =
        static_cast<int>(std::clamp<int64_t>(blocks / std::max<int64_t>(tiles, 1), 1, most));
    const double total = estimate_implicit_gemm(s, tile, s.group_k(), depth, pixels, splits,
                                                static_cast<double>(bytes), device);
    if (best < 0 || total < best) {
      best = total;
      best_splits = splits;
    }
  }
  return best_splits;
}

inline ImplicitGemmConfig choose_implicit_gemm(ConvDirection direction, const Conv2dShape& s,
                                               const Conv2dAddresses& addresses,
                                               const DeviceInfo& device) {
  ImplicitGemmConfig config{};
  config.kind = gemm_kind(s);
  config.tile = GemmTile::k64x64Elements;
  config.splits = 1;
  const int64_t vec = 16 / dtype_size(s.dtype);
  // Accesses run along the channels of x in fprop, of y and w in dgrad, of x and y in wgrad.
  const bool whole_c = s.group_c() % vec == 0, whole_k = s.group_k() % vec == 0;
  config.vectorized = s.channels_last && addresses.are_multiples_of(16) && fits_compact_coords(s) &&
                      (direction == ConvDirection::kFprop || whole_k) &&
                      (direction == ConvDirection::kDgrad || whole_c);
  config.vectorized_weight = config.vectorized && whole_c;
  config.reason = config.vectorized ? "NHWC with whole 16-byte vectors of channels"
                  : s.channels_last ? "channels are not whole 16-byte vectors: element gathers"
                                    : "NCHW: element gathers along the rows of the image";
  const int64_t depth = s.group_c() * s.taps();
  auto aligned = [&](uintptr_t address, int64_t pitch) {
    return rows_are_aligned(reinterpret_cast<const void*>(address), pitch * dtype_size(s.dtype),
                            /*alignment=*/16);
  };
  if (direction == ConvDirection::kFprop) {
    config.vectorized_matrix = aligned(addresses.w, depth);
  } else if (direction == ConvDirection::kWgrad) {
    config.vectorized_matrix = s.channels_last && whole_k && aligned(addresses.y, s.k);
    config.vectorized_d = aligned(addresses.w, depth);
  }
  if (direction == ConvDirection::kWgrad) {
    if (config.vectorized) {
      // A 128-row tile would be half empty.
      const bool small = s.group_k() <= 64 || depth <= 64;
      config.tile = small ? GemmTile::k64x64Gathered : GemmTile::k128x128;
    }
    config.splits = choose_wgrad_splits(s, config.tile, device);
  } else if (config.vectorized) {
    const ImplicitGemmExtents extents = implicit_gemm_extents(direction, s);
    auto cycles = [&](GemmTile tile) {
      return estimate_implicit_gemm(s, tile, extents.m, extents.n, extents.k, 1, 0, device);
    };
    config.tile = config.vectorized_weight && cycles(GemmTile::k128x128) < cycles(GemmTile::k128x64)
                      ? GemmTile::k128x128
                      : GemmTile::k128x64;
  }
  if (!uses_tensor_cores(config.kind)) config.tile = GemmTile::k64x64Elements;
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape& s, const ImplicitGemmConfig& config) {
  if (config.splits <= 1) return 0;
  return config.splits * s.k * s.group_c() * s.taps() * (s.dtype == DType::kFloat64 ? 8 : 4);
}

// Cycles of a choice, for comparison with another kernel's.
inline double estimate_implicit_gemm(ConvDirection direction, const Conv2dShape& s,
                                     const ImplicitGemmConfig& config, const DeviceInfo& device) {
  const auto [m, n, k] = implicit_gemm_extents(direction, s);
  return estimate_implicit_gemm(s, config.tile, m, n, k, config.splits,
                                static_cast<double>(workspace_bytes(s, config)) / config.splits,
                                device);
}

inline std::string describe(const ImplicitGemmConfig& config) {
  std::string text = "portable implicit GEMM, " + describe_portable_tile(config.kind, config.tile);
  if (config.splits > 1) text += ", split-k " + std::to_string(config.splits);
  if (config.vectorized_matrix) text += ", 16-byte loads of the matrix operand";
  if (config.vectorized_d) text += ", 16-byte stores";
  return text + " (" + config.reason + ")";
}

}  // namespace warpwright
