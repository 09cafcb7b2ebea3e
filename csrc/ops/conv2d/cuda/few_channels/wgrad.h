// Weight and bias gradient with few input channels on tensor cores (16-bit types). Rows of D are
// output channels. Columns are the taps of all channels, and one of ones for the bias. Each step
// sums over 16 neighbouring pixels of a row.
#pragma once

#include <optional>
#include <string>

#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

struct FewChannelsWgradConfig {
  bool vectorized = false;  // grad_output in 16-byte vectors of channels
  int m_blocks, chunks;     // of 16 output channels per CTA; CTAs that share a pixel
  int n_blocks;             // of 8 taps
  int warps_n;              // warps that share a pixel
  int tile_p, tile_runs;    // output rows and runs of 16 pixels per CTA and step
  int64_t tiles_p, tiles_q;
  int x_rows, x_cols;  // input pixels that a tile sees
  int64_t smem_bytes;
  int parts;  // partial sums, added in order by a second kernel
  const char* reason = "";

  int chunk_k() const { return m_blocks * 16; }
  int pitch_k() const { return chunks * chunk_k(); }
};

namespace few_channels_wgrad {

constexpr int kWarps = 8, kWarpBlocks = 3;  // columns per warp: 8 * kWarpBlocks

}  // namespace few_channels_wgrad

inline std::optional<FewChannelsWgradConfig> choose_few_channels_wgrad(
    const Conv2dShape& s, const Conv2dAddresses& addresses, const DeviceInfo& device) {
  using namespace few_channels_wgrad;
  FewChannelsWgradConfig config;
  if (gemm_kind(s) != GemmKind::k16Bit || !conv2d_few_channels_supported(s) ||
      s.w * s.c >= int64_t{1} << 30 || s.k * s.p * s.q == 0) {
    return std::nullopt;
  }
  constexpr int64_t kSize = 2;
  config.m_blocks = s.k <= 32 ? 2 : 4;
  config.chunks = static_cast<int>(ceil_div(s.k, config.chunk_k()));
  config.n_blocks = static_cast<int>(ceil_div(s.c * s.taps() + 1, 8));
  config.warps_n = 1;
  while (config.warps_n * kWarpBlocks < config.n_blocks) config.warps_n *= 2;
  const PixelTiles tiles(s);
  const int64_t x_rows = tiles.input_rows, x_cols = tiles.input_cols(s);
  const int64_t dy_bytes = tiles.rows * tiles.runs * 16 * (config.chunk_k() + 8) * kSize;
  const int64_t sums_bytes = int64_t{kWarps} * config.m_blocks * kWarpBlocks * 128 * 4;
  // The implicit GEMM takes large dilations.
  if (x_rows > 4096 || x_cols > 4096) return std::nullopt;
  config.smem_bytes =
      std::max(sums_bytes, dy_bytes + ceil_div(x_rows * x_cols * s.c * kSize, 16) * 16);
  if (config.smem_bytes > device.smem_per_block / 2 - 1024) return std::nullopt;
  config.tile_p = static_cast<int>(tiles.rows);
  config.tile_runs = static_cast<int>(tiles.runs);
  config.tiles_p = tiles.count_p;
  config.tiles_q = tiles.count_q;
  config.x_rows = static_cast<int>(x_rows);
  config.x_cols = static_cast<int>(x_cols);
  const int64_t all_tiles = s.n * config.tiles_p * config.tiles_q;
  config.parts = static_cast<int>(std::clamp<int64_t>(int64_t{device.num_sms} * 2 / config.chunks,
                                                      1, std::max<int64_t>(all_tiles, 1)));
  if (all_tiles >= (int64_t{1} << 31)) return std::nullopt;
  config.vectorized = s.channels_last && s.k % 8 == 0 && addresses.y % 16 == 0;
  config.reason = config.vectorized ? "NHWC with whole 16-byte vectors of channels"
                  : s.channels_last ? "channels are not whole 16-byte vectors: element accesses"
                                    : "NCHW: element accesses along the rows of the image";
  return config;
}

inline std::string describe(const FewChannelsWgradConfig& config) {
  return "portable few-channel kernel, 16-bit mma.sync, " + std::to_string(config.n_blocks * 8) +
         " columns of taps, tile " + std::to_string(config.tile_p) + "x" +
         std::to_string(config.tile_runs * 16) + " pixels, sums in " +
         std::to_string(config.parts) + " parts (" + config.reason + ")";
}

inline int64_t workspace_bytes(const Conv2dShape& s, const FewChannelsWgradConfig& config) {
  return int64_t{config.parts} * (s.c * s.taps() + 1) * config.pitch_k() * 4;
}

#ifdef WARPWRIGHT_WITH_CUDA
// Writes grad_weight and, if it is not null, grad_bias.
void launch_few_channels_wgrad(const Conv2dBackwardParams& params,
                               const FewChannelsWgradConfig& config, void* workspace,
                               cudaStream_t stream);
#endif

}  // namespace warpwright
