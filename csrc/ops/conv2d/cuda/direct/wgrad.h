// The configuration of the direct weight and bias gradient (wgrad.cu). CTAs write partial sums of
// runs of pixels to the workspace; a second kernel adds them in order.
#pragma once

#include <string>

#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

// How CTAs walk the taps and pixels; a kernel argument. A tile is kRunK outputs x the taps of a
// thread, of one input channel. Tile t has outputs (t % k_tiles) * kRunK and the taps t / k_tiles,
// counted channels first.
struct DirectWgradWalk {
  int k_tiles, tiles;
  int cta_tiles, chunks;  // tiles per CTA; CTAs that share a pixel
  int slices;             // runs of pixels that a CTA processes together
  int parts, part_units;  // partial sums; units per part
  int smem_pitch;         // elements, from one value of all threads to the next
  bool has_bias;
};

struct DirectWgradConfig {
  bool depthwise;
  bool vectorized;         // dy in vectors; depthwise: x too
  int tap_rows, tap_cols;  // per thread: 3 x 3, 1 x 5, 1 x 3 (depthwise) or 1 x 1
  int64_t products;        // per output
  DirectWgradWalk walk;

  int pitch_k() const { return walk.k_tiles * kRunK; }
};

// Threads per CTA and CTAs per SM, so that no register is spilled.
constexpr int direct_wgrad_threads(int tap_rows) { return tap_rows == 3 ? 128 : 256; }
constexpr int direct_wgrad_ctas(int tap_rows, bool is_double) {
  return is_double ? 1 : tap_rows == 3 ? 3 : 2;
}

inline void choose_wgrad_taps(const Conv2dShape& s, DirectWgradConfig& config) {
  config.tap_rows = config.tap_cols = 1;
  if (s.dilation_w != 1 || s.dtype == DType::kFloat64) return;
  if (config.depthwise) {
    if (config.vectorized && s.s == 3 && s.stride_w <= 2) config.tap_cols = 3;
  } else if (s.r == 3 && s.s == 3 && s.stride_w == 1) {
    config.tap_rows = config.tap_cols = 3;
  } else if (s.s == 5 && s.stride_w == 1) {
    config.tap_cols = 5;
  }
}

inline DirectWgradConfig choose_direct_wgrad(const Conv2dShape& s, bool depthwise,
                                             const Conv2dAddresses& addresses,
                                             const DeviceInfo& device) {
  DirectWgradConfig config{};
  config.depthwise = depthwise;
  config.products = s.group_c() * s.taps();
  const bool dy_in_vectors = s.channels_last ? runs_are_vectors(s.dtype, s.k, kRunK, addresses.y)
                                             : runs_are_vectors(s.dtype, s.q, kRunQ, addresses.y);
  config.vectorized =
      dy_in_vectors && (!depthwise || (s.channels_last && s.group_k() == 1 && s.h * s.w > 0 &&
                                       runs_are_vectors(s.dtype, s.k, kRunK, addresses.x)));
  choose_wgrad_taps(s, config);
  DirectWgradWalk& walk = config.walk;
  walk.k_tiles = static_cast<int>(ceil_div<int64_t>(s.k, kRunK));
  walk.tiles =
      static_cast<int>(walk.k_tiles * config.products / (config.tap_rows * config.tap_cols));
  const int threads = direct_wgrad_threads(config.tap_rows);
  // NCHW needs one warp along the pixels per tile.
  walk.cta_tiles = std::min(walk.tiles, s.channels_last ? threads : threads / 32);
  walk.chunks = ceil_div(walk.tiles, walk.cta_tiles);
  walk.slices = threads / walk.cta_tiles;
  const int units = direct_units(s);
  const int ctas = device.num_sms * direct_wgrad_ctas(config.tap_rows, s.dtype == DType::kFloat64);
  walk.parts = std::clamp(ctas / walk.chunks, 1, std::max(1, ceil_div(units, walk.slices)));
  walk.part_units = ceil_div(ceil_div(units, walk.parts), walk.slices) * walk.slices;
  walk.smem_pitch = threads + (s.channels_last ? walk.cta_tiles % 32 : 1);
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape& s, const DirectWgradConfig& config) {
  return config.walk.parts * (config.products + 1) * config.pitch_k() * accum_size(s.dtype);
}

inline std::string describe(const DirectWgradConfig& config) {
  const std::string sums = ", sums in " + std::to_string(config.walk.parts) + " parts";
  if (config.depthwise) {
    return "portable depthwise kernel, FMA: one input channel per output" + sums;
  }
  return "portable few-channel kernel, FMA: " + std::to_string(config.products) +
         " products per output, nothing is unfolded" + sums;
}

#ifdef WARPWRIGHT_WITH_CUDA
// Writes grad_weight and, if it is not null, grad_bias.
void launch_direct_wgrad(const Conv2dBackwardParams& params, const DirectWgradConfig& config,
                         void* workspace, cudaStream_t stream);
// Adds `partials` (parts, taps + 1, pitch_k) in order; the last tap is the bias.
void launch_direct_wgrad_sum(const Conv2dBackwardParams& params, int parts, int pitch_k,
                             const void* partials, cudaStream_t stream);
#endif

}  // namespace warpwright
