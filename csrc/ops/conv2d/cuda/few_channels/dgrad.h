// Input gradient with few input channels on tensor cores. A row of D is a block of blk_h x blk_w
// input pixels with all channels. The product then uses up to 16 columns, where an implicit GEMM
// over pixels uses 1 to 4. Blocks are whole strides, so pixels of all phases see one dense window
// of grad_output. Each pixel multiplies its own taps; the other weights are zero.
#pragma once

#include <optional>
#include <string>

#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

struct FewChannelsDgradConfig {
  bool tf32 = false;
  bool vectorized = false;  // grad_output in 16-byte vectors of channels
  int blk_h, blk_w;         // input pixels per row of D
  int columns;              // blk_h * blk_w * channels
  int step_h, step_w;       // grad_output pixels from one block to the next
  int first_h, first_w;     // grad_output pixel at the window's origin of block 0
  int window_h, window_w;   // grad_output pixels that a block sees
  int tile_h, tile_w;       // blocks per CTA's tile
  int64_t tiles_h, tiles_w;
  int rows, cols;    // grad_output pixels that a tile sees
  int column_slots;  // per row in shared memory: a multiple of step_w
  int k_pad;         // output channels, rounded up to whole steps of the tensor core
  int64_t smem_bytes;
  const char* reason = "";

  int tile_blocks() const { return tile_h * tile_w; }
};

namespace few_channels_dgrad {

constexpr int kMaxColumns = 16, kMaxBlockPixels = 8, kMaxTileBlocks = 256;

struct Window {
  int64_t first, extent;
};

// The outputs that inputs 0 .. blk - 1 see along one direction.
inline Window window_of(int64_t blk, int64_t stride, int64_t pad, int64_t dilation, int64_t taps) {
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (int64_t i = 0; i < blk; ++i) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t at = i + pad - tap * dilation;
      if (at % stride != 0) continue;
      low = std::min(low, at / stride);
      high = std::max(high, at / stride);
    }
  }
  return {low, high - low + 1};
}

}  // namespace few_channels_dgrad

inline std::optional<FewChannelsDgradConfig> choose_few_channels_dgrad(
    const Conv2dShape& s, const Conv2dAddresses& addresses, const DeviceInfo& device) {
  using namespace few_channels_dgrad;
  FewChannelsDgradConfig config;
  const GemmKind kind = gemm_kind(s);
  if (s.c * s.h * s.w * s.k == 0) return std::nullopt;
  const int64_t limit = int64_t{kMaxColumns} / s.c;
  if ((kind != GemmKind::k16Bit && kind != GemmKind::kTf32) || !conv2d_few_channels_supported(s) ||
      s.k > 1024 || s.stride_h > limit || s.stride_w > limit || s.stride_h * s.stride_w > limit) {
    return std::nullopt;
  }
  const int64_t size = dtype_size(s.dtype), vec = 16 / size;
  int64_t blk_h = s.stride_h, blk_w = s.stride_w;
  const int64_t pixels = std::min<int64_t>(limit, kMaxBlockPixels);
  while (2 * blk_h * blk_w <= pixels) (blk_w <= blk_h ? blk_w : blk_h) *= 2;
  const Window down = window_of(blk_h, s.stride_h, s.pad_h, s.dilation_h, s.r);
  const Window across = window_of(blk_w, s.stride_w, s.pad_w, s.dilation_w, s.s);
  const int64_t step_h = blk_h / s.stride_h, step_w = blk_w / s.stride_w;
  const int64_t k_pad = ceil_div(s.k, 32) * 32;
  const int64_t columns = blk_h * blk_w * s.c;
  const int64_t weight_bytes =
      ceil_div(columns, 8) * 8 * (down.extent * across.extent * k_pad + vec) * size;

  // Tiles of equal size, about square in pixels, for two CTAs per SM.
  const int64_t budget = device.smem_per_block / 2 - 1024;
  const int64_t blocks_h = ceil_div(s.h, blk_h), blocks_w = ceil_div(s.w, blk_w);
  int64_t tiles_h = ceil_div(blocks_h, kMaxTileBlocks),
          tiles_w = ceil_div(blocks_w, kMaxTileBlocks);
  for (;;) {
    const int64_t tile_h = ceil_div(blocks_h, tiles_h), tile_w = ceil_div(blocks_w, tiles_w);
    const int64_t rows = (tile_h - 1) * step_h + down.extent;
    const int64_t cols = (tile_w - 1) * step_w + across.extent;
    const int64_t slots = ceil_div(cols, step_w) * step_w;
    const int64_t bytes = weight_bytes + rows * slots * (k_pad + vec) * size;
    if (tile_h * tile_w <= kMaxTileBlocks && bytes <= budget) {
      config.blk_h = static_cast<int>(blk_h);
      config.blk_w = static_cast<int>(blk_w);
      config.columns = static_cast<int>(columns);
      config.step_h = static_cast<int>(step_h);
      config.step_w = static_cast<int>(step_w);
      config.first_h = static_cast<int>(down.first);
      config.first_w = static_cast<int>(across.first);
      config.window_h = static_cast<int>(down.extent);
      config.window_w = static_cast<int>(across.extent);
      config.tile_h = static_cast<int>(tile_h);
      config.tile_w = static_cast<int>(tile_w);
      config.tiles_h = ceil_div(blocks_h, tile_h);
      config.tiles_w = ceil_div(blocks_w, tile_w);
      config.rows = static_cast<int>(rows);
      config.cols = static_cast<int>(cols);
      config.column_slots = static_cast<int>(slots);
      config.k_pad = static_cast<int>(k_pad);
      config.smem_bytes = bytes;
      break;
    }
    // Less than a warp's rows: the window is too large for these kernels.
    if (tile_h * tile_w <= 16) return std::nullopt;
    int64_t& more = tile_h * blk_h > tile_w * blk_w ? tiles_h : tiles_w;
    more += 1 + more / 16;
  }
  if (s.n * config.tiles_h * config.tiles_w >= (int64_t{1} << 31)) return std::nullopt;
  config.tf32 = kind == GemmKind::kTf32;
  config.vectorized = s.channels_last && s.k % vec == 0 && addresses.are_multiples_of(16);
  config.reason = config.vectorized ? "NHWC with whole 16-byte vectors of channels"
                  : s.channels_last ? "channels are not whole 16-byte vectors: element accesses"
                                    : "NCHW: element accesses along the rows of the image";
  return config;
}

inline std::string describe(const FewChannelsDgradConfig& config) {
  return std::string("portable few-channel kernel, ") + (config.tf32 ? "TF32" : "16-bit") +
         " mma.sync, blocks of " + std::to_string(config.blk_h) + "x" +
         std::to_string(config.blk_w) + " pixels as " + std::to_string(config.columns) +
         " columns, tile " + std::to_string(config.tile_h) + "x" + std::to_string(config.tile_w) +
         " blocks (" + config.reason + ")";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_few_channels_dgrad(const Conv2dBackwardParams& params,
                               const FewChannelsDgradConfig& config, cudaStream_t stream);
#endif

}  // namespace warpwright
