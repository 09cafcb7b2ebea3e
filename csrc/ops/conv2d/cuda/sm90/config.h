// The configuration of a convolution on sm_90a: channels-last images of 16 bits or in TF32, windows
// by TMA's im2col mode, products by wgmma (operands.cuh). An estimate of cycles chooses the tile
// and the split, as for the matrix product.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>

#include "common/ceil_div.h"
#include "gemm/gemm.h"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

// The name gives rows x columns of D. kTransposed: D's transpose, 64 channels x 256 pixels, which
// reads fewer bytes of shared memory per product than 128x64.
enum class TmaIm2colTile { k256x128, k128x256, k128x128, k128x64, k64x192, k64x128, kTransposed };
constexpr int kTmaIm2colTiles = 7;

struct TmaIm2colConfig {
  ConvDirection direction;
  GemmKind kind;  // k16Bit or kTf32
  TmaIm2colTile tile;
  int splits;          // wgrad: runs of pixels, summed in order by a second kernel
  bool sums_bias;      // wgrad: the kernel writes the bias gradient too
  bool stores_planes;  // fprop, dgrad of stride 1: D is NCHW
  int64_t workspace_bytes;
  const char* reason;
};

constexpr Sm90TileShape tma_im2col_tile(TmaIm2colTile tile) {
  constexpr Sm90TileShape kShapes[kTmaIm2colTiles] = {
      {256, 128, 4, false}, {128, 256, 4, false}, {128, 128, 6, true}, {128, 64, 8, true},
      {64, 192, 6, true},   {64, 128, 8, true},   {64, 256, 4, true}};
  return kShapes[static_cast<int>(tile)];
}

// fprop and dgrad have many rows and few columns, wgrad the reverse. wgrad in TF32 has another
// mainloop (tile/mn_major_tf32_sm90.cuh).
constexpr bool has_tma_im2col_tile(ConvDirection direction, TmaIm2colTile tile, GemmKind kind) {
  const Sm90TileShape shape = tma_im2col_tile(tile);
  const bool wgrad = direction == ConvDirection::kWgrad;
  if (wgrad && kind == GemmKind::kTf32) {
    return (shape.blk_m == 128 || shape.blk_n == 128) && shape.blk_m != 256;
  }
  const bool wide = shape.blk_m < shape.blk_n && tile != TmaIm2colTile::kTransposed;
  return tile == TmaIm2colTile::k128x128 || wide == wgrad;
}

// ---- the product ----

// Channels of a k tile, and for wgrad pixels: 128 bytes.
constexpr int64_t conv_chunk(DType dtype) { return 128 / dtype_size(dtype); }
constexpr int64_t kConvChunk = conv_chunk(DType::kBFloat16);

// The windows along one axis of an image: of x, or of dy for dgrad.
struct WindowAxis {
  int64_t size;     // of the image
  int64_t windows;  // per image
  int64_t stride;
  int64_t pad;  // before the image, maybe negative
  int64_t taps;
  int64_t dilation;
  int64_t first_tap = 0;  // the filter's tap for the first tap of a window
  int64_t tap_step = 1;   // in the filter, for one tap further in the window

  // TMA stores the corners of a box and the offsets of a tap in 8 bits.
  bool fits_tma() const {
    const int64_t upper = (windows - 1) * stride - pad - (size - 1);
    return stride <= 8 && (taps - 1) * dilation <= 255 && pad >= -127 && pad <= 128 &&
           upper >= -128 && upper <= 127;
  }
};
using WindowAxes = std::array<WindowAxis, 2>;  // height, width

inline WindowAxes window_axes(const Conv2dShape& s) {
  return {{{s.h, s.p, s.stride_h, s.pad_h, s.r, s.dilation_h},
           {s.w, s.q, s.stride_w, s.pad_w, s.s, s.dilation_w}}};
}

// dgrad's windows of dy for the rows (or columns) phase, phase + stride, ... of dx; `x` are the
// windows of x. They have stride 1, and the taps that reach these rows in reverse order.
inline WindowAxis dgrad_axis(const WindowAxis& x, int64_t phase) {
  const int64_t rows = ceil_div(std::max<int64_t>(0, x.size - phase), x.stride);
  const int64_t tap_step = x.stride / std::gcd(x.stride, x.dilation);
  for (int64_t first = 0; first < std::min(x.taps, x.stride); ++first) {
    // Tap `first` of this window of x covers row `phase` if that is a whole number.
    const int64_t distance = phase + x.pad - first * x.dilation;
    if (distance % x.stride != 0) continue;
    const int64_t taps = (x.taps - 1 - first) / tap_step + 1;
    const int64_t dilation = x.dilation * tap_step / x.stride;
    return {.size = x.windows,
            .windows = rows,
            .stride = 1,
            .pad = (taps - 1) * dilation - distance / x.stride,
            .taps = taps,
            .dilation = dilation,
            .first_tap = first + (taps - 1) * tap_step,
            .tap_step = -tap_step};
  }
  return {.size = x.windows, .windows = rows, .stride = 1, .pad = 0, .taps = 0, .dilation = 1};
}

// One launch of the kernel: D (m, n) = A B^T. A k tile is a whole chunk of channels under a tap, or
// for wgrad a run of pixels. dgrad: D has the rows phase_h, phase_h + stride_h, ... of dx, and
// likewise its columns.
struct ConvPart {
  WindowAxes windows;
  int64_t m, n, k_tiles;
  int64_t phase_h = 0, phase_w = 0;
};

// Calls f(part) for each launch of a direction: one, or one per phase of dgrad. Phases that no tap
// reaches are zero and have no launch.
template <class F>
void for_each_part(ConvDirection direction, const Conv2dShape& s, F&& f) {
  const WindowAxes windows = window_axes(s);
  const int64_t outputs = s.n * s.p * s.q, chunk = conv_chunk(s.dtype);
  if (direction == ConvDirection::kFprop) {
    return f(ConvPart{windows, outputs, s.k, s.taps() * ceil_div(s.group_c(), chunk)});
  }
  if (direction == ConvDirection::kWgrad) {
    return f(ConvPart{windows, s.k, s.taps() * s.group_c(), ceil_div(outputs, chunk)});
  }
  for (int64_t h = 0; h < s.stride_h; ++h) {
    for (int64_t w = 0; w < s.stride_w; ++w) {
      const WindowAxes dy{dgrad_axis(windows[0], h), dgrad_axis(windows[1], w)};
      const int64_t rows = s.n * dy[0].windows * dy[1].windows;
      const int64_t taps = dy[0].taps * dy[1].taps;
      const int64_t k_tiles = taps * ceil_div(s.group_k(), chunk);
      if (rows > 0 && taps > 0) f(ConvPart{dy, rows, s.c, k_tiles, h, w});
    }
  }
}

// ---- choice ----

constexpr int64_t kMaxDgradPhases = 4;  // launches

inline bool has_tma_im2col_type(const Conv2dShape& s) {
  const GemmKind kind = gemm_kind(s);
  return kind == GemmKind::k16Bit || kind == GemmKind::kTf32;
}

// Null if these kernels can take the direction, else the reason why not.
inline const char* why_not_tma_im2col(ConvDirection direction, const Conv2dShape& s,
                                      const Conv2dAddresses& addresses) {
  constexpr int64_t kMaxExtent = int64_t{1} << 30;  // tile coordinates are 32-bit
  const bool dgrad = direction == ConvDirection::kDgrad;
  if (!s.sm90) return "no sm_90a";
  if (!has_tma_im2col_type(s)) return "neither a 16-bit type nor TF32";
  if (!s.channels_last) return "NCHW";
  if (!addresses.are_multiples_of(16)) return "an address is no multiple of 16 bytes";
  const bool is_16bit = gemm_kind(s) == GemmKind::k16Bit;
  const int64_t vec = 16 / dtype_size(s.dtype), chunk = conv_chunk(s.dtype);
  if (s.c % vec != 0 || (direction != ConvDirection::kFprop && s.k % vec != 0)) {
    return "channels are not whole 16-byte vectors";
  }
  if (dgrad && s.stride_h * s.stride_w > kMaxDgradPhases) {
    return "the input gradient of strides over 2x2";
  }
  if (direction == ConvDirection::kWgrad && s.group_c() % chunk != 0) {
    return is_16bit ? "input channels are no multiple of 64"
                    : "input channels are no multiple of 32";
  }
  if (s.groups > 1 && (dgrad ? s.group_k() : s.group_c()) % chunk != 0) {
    return is_16bit ? "channels of a group are no multiple of 64"
                    : "channels of a group are no multiple of 32";
  }
  const char* why_not = "no window reaches the image";
  bool fits = true;
  for_each_part(direction, s, [&](const ConvPart& part) {
    fits = fits && part.windows[0].fits_tma() && part.windows[1].fits_tma();
    const int64_t filter = s.taps() * s.group_c();
    const bool small = std::max({part.m, part.n, part.k_tiles * chunk, filter}) <= kMaxExtent;
    why_not = !fits    ? "stride, padding or dilation over TMA's limits"
              : !small ? "an extent over 2^30"
                       : nullptr;
  });
  return why_not;
}

inline bool takes_tile(ConvDirection direction, const Conv2dShape& s, TmaIm2colTile tile) {
  if (!has_tma_im2col_tile(direction, tile, gemm_kind(s))) return false;
  const Sm90TileShape shape = tma_im2col_tile(tile);
  const bool dgrad = direction == ConvDirection::kDgrad;
  if (tile == TmaIm2colTile::kTransposed) {
    // Whole tiles of channels. At 16 bits TMA stores them.
    const int64_t columns = dgrad ? s.c : s.k;
    const bool phases = dgrad && s.stride_h * s.stride_w > 1;
    return !phases && columns % 8 == 0 && columns / s.groups % shape.blk_m == 0;
  }
  // A tile must be within one group.
  if (s.groups == 1) return true;
  return direction == ConvDirection::kFprop ? s.group_k() % shape.blk_n == 0
         : dgrad                            ? s.group_c() % shape.blk_n == 0
                                            : s.group_k() % shape.blk_m == 0;
}

inline double estimate_part_cycles(const ConvPart& p, TmaIm2colTile tile, int splits,
                                   const DeviceInfo& device, GemmKind kind = GemmKind::k16Bit,
                                   bool wgrad = false) {
  // Fitted to measured times of a k tile in one round of tiles and in several, and of filling the
  // ring and the last store. No other mainloop overlaps the stores of the largest tiles.
  constexpr double kTileCycles[kTmaIm2colTiles][2] = {
      {1200, 1200}, {1150, 1150}, {650, 670}, {330, 550}, {700, 700}, {620, 560}, {640, 700}};
  constexpr double kFirstAndLast[kTmaIm2colTiles] = {4000, 4000, 5500, 2750, 4000, 2750, 5500};
  // TF32 takes as long per k tile, which has half the depth, and D has twice the bytes. wgrad,
  // which transposes dy, takes as long as shared memory: its bytes at 128 per cycle.
  constexpr double kTransposing[kTmaIm2colTiles] = {0, 1410, 900, 640, 0, 580, 0};
  constexpr double kTransposingLast = 5500;
  constexpr double kExposedTf32Store = 9000;
  constexpr double kSecondLaunch = 2500, kSplit = 200;
  const Sm90TileShape shape = tma_im2col_tile(tile);
  const int t = static_cast<int>(tile);
  const bool transposed = tile == TmaIm2colTile::kTransposed;
  const int64_t tiles = ceil_div(transposed ? p.n : p.m, shape.blk_m) *
                        ceil_div(transposed ? p.m : p.n, shape.blk_n) * splits;
  const int64_t rounds = ceil_div<int64_t>(tiles, device.num_sms);
  const int64_t k_tiles = ceil_div<int64_t>(p.k_tiles, splits);
  const bool tf32 = kind == GemmKind::kTf32, transposes = tf32 && wgrad;
  const double tile_cycles = transposes ? kTransposing[t] : kTileCycles[t][rounds > 1];
  const double first_and_last = transposes                 ? kTransposingLast
                                : tf32 && !shape.ping_pong ? kExposedTf32Store
                                                           : kFirstAndLast[t];
  double cycles = static_cast<double>(rounds * k_tiles) * tile_cycles +
                  first_and_last * static_cast<double>(shape.ping_pong ? 1 : rounds);
  if (splits > 1) {
    cycles += kSecondLaunch + kSplit * splits +
              8.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * (splits + 1) /
                  kPartBytesPerCycle;
  }
  return cycles;
}

constexpr int64_t kMaxTmaIm2colWorkspace = int64_t{32} << 20;

// Sets the fastest tile and split; returns their estimate, negative if no tile fits the groups.
inline double choose_tma_im2col_tile(const Conv2dShape& s, const DeviceInfo& device,
                                     TmaIm2colConfig& config) {
  const bool wgrad = config.direction == ConvDirection::kWgrad;
  const int64_t part_bytes = s.k * (s.taps() * s.group_c() + (config.sums_bias ? 1 : 0)) * 4;
  double best = -1;
  for (int t = 0; t < kTmaIm2colTiles; ++t) {
    const auto tile = static_cast<TmaIm2colTile>(t);
    const Sm90TileShape shape = tma_im2col_tile(tile);
    if (!takes_tile(config.direction, s, tile)) continue;
    // wgrad: splits that fill whole rounds.
    for (int rounds = 0; rounds <= (wgrad ? 4 : 0); ++rounds) {
      double cycles = 0;
      int splits = 1;
      for_each_part(config.direction, s, [&](const ConvPart& part) {
        const int64_t tiles = ceil_div(part.m, shape.blk_m) * ceil_div(part.n, shape.blk_n);
        const int64_t most = std::max<int64_t>(
            1, std::min(part.k_tiles / kMinSplitTiles, kMaxTmaIm2colWorkspace / part_bytes));
        splits = static_cast<int>(std::clamp<int64_t>(rounds * device.num_sms / tiles, 1, most));
        cycles += estimate_part_cycles(part, tile, splits, device, config.kind, wgrad);
      });
      if (best >= 0 && cycles >= best) continue;
      best = cycles;
      config.tile = tile;
      config.splits = splits;
      config.workspace_bytes = splits > 1 ? splits * part_bytes : 0;
    }
  }
  return best;
}

// Of a chosen configuration, to compare with the walks. With few channels the transposed tile waits
// for L2, which the choice among these tiles leaves out.
inline double estimate_tma_im2col(const Conv2dShape& s, TmaIm2colConfig config,
                                  const DeviceInfo& device) {
  constexpr double kWaits = 1.36, kWaitsTf32 = 1.5;
  const double cycles = choose_tma_im2col_tile(s, device, config);
  if (config.tile != TmaIm2colTile::kTransposed) return cycles;
  return cycles * (config.kind == GemmKind::kTf32 ? kWaitsTf32 : kWaits);
}

// None if another kernel takes it. `sums`: wgrad's bias gradient, null if it is not wanted.
// `other_cycles`: the estimate of the kernel that would take it instead.
inline std::optional<TmaIm2colConfig> choose_tma_im2col(ConvDirection direction,
                                                        const Conv2dShape& s,
                                                        const Conv2dAddresses& addresses,
                                                        const void* sums, double other_cycles,
                                                        const DeviceInfo& device) {
  if (why_not_tma_im2col(direction, s, addresses) != nullptr) return std::nullopt;
  const GemmKind kind = gemm_kind(s);
  // TMA and wgmma would round the sums' float32 operand to TF32.
  const bool sums_bias = sums != nullptr && kind == GemmKind::k16Bit;
  TmaIm2colConfig config{.direction = direction, .kind = kind, .sums_bias = sums_bias};
  const double cycles = choose_tma_im2col_tile(s, device, config);
  if (cycles < 0 || cycles > other_cycles) return std::nullopt;
  config.reason = config.splits > 1         ? "few output tiles for the SMs: pixels are split"
                  : kind == GemmKind::kTf32 ? "TF32 NHWC with whole 16-byte vectors of channels"
                                            : "16-bit NHWC with whole 16-byte vectors of channels";
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape&, const TmaIm2colConfig& config) {
  return config.workspace_bytes;
}

inline std::string describe(const TmaIm2colConfig& config) {
  const Sm90TileShape shape = tma_im2col_tile(config.tile);
  const bool tf32 = config.kind == GemmKind::kTf32;
  std::string text =
      std::string("sm_90a ") + (tf32 ? "TF32" : "16-bit") + " wgmma, windows by TMA, " +
      (config.tile == TmaIm2colTile::kTransposed ? "transposed " : "") + "tile " +
      extents(shape.blk_m, shape.blk_n) + (shape.ping_pong ? " ping-pong, " : ", ") +
      std::to_string(shape.stages) + " stages" + (config.stores_planes ? ", stores NCHW" : "");
  if (config.splits > 1) text += ", split-k " + std::to_string(config.splits);
  return text + " (" + config.reason + ")";
}

}  // namespace warpwright
