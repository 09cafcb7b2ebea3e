// Forward with few input channels and a large window (the stem of an image network) on tensor
// cores, for 16-bit types in NHWC. Rows of D are pixels, columns output channels. The window's
// elements come in pairs that are adjacent in a row of the image.
#pragma once

#include <optional>
#include <string>

#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

struct FewChannelsFpropConfig {
  bool paired = false;          // pairs of elements are 4-byte aligned in shared memory
  bool paired_outputs = false;  // pairs of outputs are 4-byte aligned
  int n_blocks, chunks;         // of 8 output channels per CTA; CTAs that share a pixel
  int row_taps, taps;           // per row of the window, even; of all rows, whole steps of 16
  int tile_p, tile_runs;        // output rows and runs of 16 pixels per CTA and step
  int64_t tiles_p, tiles_q;
  int x_rows, x_pitch;  // input rows that a tile sees, their elements
  int64_t smem_bytes;
  const char* reason = "";

  int chunk_k() const { return n_blocks * 8; }
};

inline std::optional<FewChannelsFpropConfig> choose_few_channels_fprop(
    const Conv2dShape& s, const Conv2dAddresses& addresses, const DeviceInfo& device) {
  FewChannelsFpropConfig config;
  // With fewer products per output, the output's bytes also bound the FMA kernel.
  constexpr int64_t kMinTaps = 32, kSize = 2;
  if (gemm_kind(s) != GemmKind::k16Bit || !conv2d_few_channels_supported(s) ||
      s.c * s.taps() <= kMinTaps || s.dilation_w != 1 || s.w * s.c >= int64_t{1} << 30 ||
      s.k * s.p * s.q == 0) {
    return std::nullopt;
  }
  config.n_blocks = s.k <= 32 ? 4 : 8;
  config.chunks = static_cast<int>(ceil_div(s.k, config.chunk_k()));
  config.row_taps = static_cast<int>(ceil_div(s.s * s.c, 2) * 2);
  config.taps = static_cast<int>(ceil_div(s.r * config.row_taps, 16) * 16);
  const PixelTiles tiles(s);
  const int64_t x_rows = tiles.input_rows, x_cols = tiles.input_cols(s);
  // An odd row's last pair reads one more element.
  const int64_t x_pitch = ceil_div(x_cols * s.c + 1, 2) * 2;
  if (x_rows > 4096 || x_pitch > 4096) return std::nullopt;
  config.smem_bytes = config.chunk_k() * (config.taps + 8) * kSize + config.taps / 2 * 8 +
                      ceil_div(x_rows * x_pitch * kSize, 16) * 16;
  if (config.smem_bytes > device.smem_per_block / 2 - 1024) return std::nullopt;
  config.tile_p = static_cast<int>(tiles.rows);
  config.tile_runs = static_cast<int>(tiles.runs);
  config.tiles_p = tiles.count_p;
  config.tiles_q = tiles.count_q;
  config.x_rows = static_cast<int>(x_rows);
  config.x_pitch = static_cast<int>(x_pitch);
  config.paired = s.stride_w * s.c % 2 == 0;
  config.paired_outputs = s.channels_last && s.k % 2 == 0 && addresses.y % 4 == 0;
  config.reason = s.channels_last ? "NHWC, a large window" : "NCHW: element stores, a large window";
  if (s.n * config.tiles_p * config.tiles_q >= (int64_t{1} << 31)) return std::nullopt;
  return config;
}

inline std::string describe(const FewChannelsFpropConfig& config) {
  return "portable few-channel kernel, 16-bit mma.sync, " + std::to_string(config.taps) +
         " taps in pairs, tile " + std::to_string(config.tile_p) + "x" +
         std::to_string(config.tile_runs * 16) + " pixels x " + std::to_string(config.chunk_k()) +
         " channels (" + config.reason + ")";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_few_channels_fprop(const Conv2dParams& params, const FewChannelsFpropConfig& config,
                               cudaStream_t stream);
#endif

}  // namespace warpwright
