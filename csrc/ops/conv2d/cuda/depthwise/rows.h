// Depthwise convolutions of channels-last images on sm_90a (rows_sm90.cuh). TMA loads rows of
// pixels, with the padding as zeros. A thread has two channels of a run of columns, and walks down
// the rows of an image. All sums that are not finished are in registers, so each element is read
// from memory once.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "common/ceil_div.h"
#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

constexpr int kRowsPair = 2;  // channels per thread
constexpr int kRowsRun = 4;   // columns per thread: of y, or of dx

// Consumer threads per CTA at most, and CTAs per SM, so that no register is spilled. One more warp
// issues the copies.
constexpr int depthwise_rows_threads(int taps) { return taps == 3 ? 256 : taps == 5 ? 160 : 224; }
constexpr int depthwise_rows_ctas(int taps) { return taps == 7 ? 1 : 2; }

// Stages of the ring. A stage is one row of the box: as many bytes for each element size.
constexpr int depthwise_rows_stages(int64_t element_size) { return element_size == 2 ? 8 : 4; }

// How CTAs walk an image; a kernel argument. A box is one row of `box_cols` pixels of `images`
// images and `box_channels` channels. Its threads have `strips` runs of columns.
struct DepthwiseRowsWalk {
  int box_channels, chunks;  // chunks: boxes that cover all channels
  int strips, images, box_cols;
  int col_tiles, row_tiles, tile_rows;
  int units, parts;           // a unit is one box walking down tile_rows; parts: CTAs per chunk
  int stage_bytes, dy_bytes;  // of a stage; of its row of dy, which comes last (wgrad)
};

struct DepthwiseRowsConfig {
  ConvDirection direction;
  bool flip;  // dgrad of stride 1: the forward of the flipped window
  int taps, stride;
  DepthwiseRowsWalk walk;
  const char* reason = nullptr;  // why this kernel
  int threads() const {
    const int pairs = walk.box_channels / kRowsPair;
    return ceil_div(pairs * walk.strips * walk.images, 32) * 32 + 32;
  }
  // Of the ring, and of five taps' sums of wgrad.
  int64_t smem_bytes(int64_t element_size) const {
    return std::max(depthwise_rows_stages(element_size) * int64_t{walk.stage_bytes},
                    int64_t{5} * threads() * kRowsPair * 4);
  }
};

// What a thread's run covers: for dgrad of stride 2, pairs of rows and columns of the padded dx.
struct DepthwiseRowsExtent {
  int64_t rows, cols;  // of runs' elements
  int run;             // columns per thread
  int box_cols(int strips, int taps, int stride, bool is_phases) const {
    return is_phases ? strips * run + (taps - 1) / 2 : (strips * run - 1) * stride + taps;
  }
};

inline bool is_phased_dgrad(ConvDirection direction, const Conv2dShape& s) {
  return direction == ConvDirection::kDgrad && s.stride_w == 2;
}

inline DepthwiseRowsExtent depthwise_rows_extent(ConvDirection direction, const Conv2dShape& s) {
  if (!is_phased_dgrad(direction, s)) return {s.p, s.q, kRowsRun};
  return {(s.h - 1 + s.pad_h) / 2 - s.pad_h / 2 + 1, (s.w - 1 + s.pad_w) / 2 - s.pad_w / 2 + 1,
          kRowsRun / 2};
}

// If the images are few, cuts the rows among CTAs; each part reads its halo again. Distributes the
// units to the CTAs of a chunk.
inline void deal_depthwise_units(ConvDirection direction, const Conv2dShape& s, int64_t rows,
                                 const DeviceInfo& device, DepthwiseRowsWalk& walk) {
  const int64_t columns = walk.col_tiles * ceil_div<int64_t>(s.n, walk.images);
  const int64_t ctas =
      int64_t{device.num_sms} * depthwise_rows_ctas(static_cast<int>(s.s)) / walk.chunks;
  int64_t tiles = 1;
  if (direction != ConvDirection::kWgrad && columns < 2 * ctas) {
    tiles = std::max<int64_t>(1, std::min(ceil_div(2 * ctas, columns), rows / 8));
  }
  walk.tile_rows = static_cast<int>(ceil_div(rows, tiles));
  walk.row_tiles = static_cast<int>(ceil_div<int64_t>(rows, walk.tile_rows));
  walk.units = static_cast<int>(columns * walk.row_tiles);
  walk.parts = static_cast<int>(std::clamp<int64_t>(ctas, 1, walk.units));
}

// A walk's relative time: rounds of units per CTA * steps of a unit * threads. Halo columns and
// partly used 32-byte sectors make it longer.
inline double estimate_depthwise_walk(ConvDirection direction, const Conv2dShape& s,
                                      const DepthwiseRowsExtent& extent,
                                      const DepthwiseRowsWalk& walk) {
  // A CTA with fewer threads takes as long per step: it waits for its own chain of sums.
  constexpr double kLeastFilled = 0.6;
  const int taps = static_cast<int>(s.s);
  const bool is_phases = is_phased_dgrad(direction, s);
  const int stride = is_phases ? 1 : static_cast<int>(s.stride_w);
  const int bytes = walk.box_channels * static_cast<int>(dtype_size(s.dtype));
  const int threads = ceil_div(walk.box_channels / kRowsPair * walk.strips * walk.images, 32) * 32;
  const int steps = (walk.tile_rows - 1) * stride + (is_phases ? (taps + 1) / 2 : taps);
  const double halo = static_cast<double>(walk.box_cols) / (walk.strips * extent.run * stride);
  double sectors = ceil_div(bytes, 32) * 32.0 / bytes;
  if (bytes < 64 && walk.chunks > 1) sectors *= 1.3;
  return static_cast<double>(ceil_div(walk.units, walk.parts)) * steps *
         std::max<double>(threads, kLeastFilled * depthwise_rows_threads(taps)) *
         (1 + 0.3 * (halo - 1)) * sectors;
}

// The walk with the least estimated time.
inline DepthwiseRowsWalk choose_depthwise_walk(ConvDirection direction, const Conv2dShape& s,
                                               const DeviceInfo& device) {
  const int taps = static_cast<int>(s.s), stride = static_cast<int>(s.stride_w);
  const bool is_phases = is_phased_dgrad(direction, s);
  const DepthwiseRowsExtent extent = depthwise_rows_extent(direction, s);
  const int step = static_cast<int>(16 / dtype_size(s.dtype));
  const int max_channels = static_cast<int>(
      std::min<int64_t>(ceil_div<int64_t>(s.c, step) * step, 256 / dtype_size(s.dtype)));
  const int all_strips = static_cast<int>(ceil_div<int64_t>(extent.cols, extent.run));
  DepthwiseRowsWalk best{};
  double best_time = 0;
  const int least_channels =
      static_cast<int>(std::min<int64_t>(max_channels, 64 / dtype_size(s.dtype)));
  for (int channels = least_channels; channels <= max_channels; channels += step) {
    const int fit = depthwise_rows_threads(taps) / (channels / kRowsPair);  // strips x images
    const int least_tiles = ceil_div(all_strips, std::min(all_strips, fit));
    for (int col_tiles = least_tiles; col_tiles <= least_tiles + 1; ++col_tiles) {
      const int strips = ceil_div(all_strips, col_tiles);
      const int box_cols = extent.box_cols(strips, taps, stride, is_phases);
      if (box_cols > 256) continue;
      const int64_t most_images =
          std::clamp<int64_t>(col_tiles == 1 ? fit / strips : 1, 1, std::clamp<int64_t>(s.n, 1, 8));
      for (int images = 1; images <= most_images; ++images) {
        DepthwiseRowsWalk walk{};
        walk.box_channels = channels;
        walk.chunks = static_cast<int>(ceil_div<int64_t>(s.c, channels));
        walk.strips = strips, walk.images = images, walk.box_cols = box_cols;
        walk.col_tiles = ceil_div(all_strips, strips);
        deal_depthwise_units(direction, s, extent.rows, device, walk);
        const double time = estimate_depthwise_walk(direction, s, extent, walk);
        if (best.chunks == 0 || time < 0.999 * best_time) best = walk, best_time = time;
      }
    }
  }
  return best;
}

inline DepthwiseRowsConfig choose_depthwise_rows(ConvDirection direction, const Conv2dShape& s,
                                                 bool flip, const DeviceInfo& device) {
  DepthwiseRowsWalk walk = choose_depthwise_walk(direction, s, device);
  auto bytes = [&](int cols) {
    const int64_t box = walk.box_channels * cols * walk.images * dtype_size(s.dtype);
    return static_cast<int>(ceil_div<int64_t>(box, 128) * 128);
  };
  walk.dy_bytes = direction == ConvDirection::kWgrad ? bytes(walk.strips * kRowsRun) : 0;
  walk.stage_bytes = bytes(walk.box_cols) + walk.dy_bytes;
  return {direction, flip, static_cast<int>(s.s), static_cast<int>(s.stride_w), walk};
}

inline int64_t workspace_bytes(const Conv2dShape& s, const DepthwiseRowsConfig& config) {
  if (config.direction != ConvDirection::kWgrad) return 0;
  return config.walk.parts * (s.taps() + 1) * s.c * accum_size(s.dtype);
}

// Why the sm_90a kernels of rows do not take a channels-last problem; null if they do. `s` is the
// forward's shape, for a dgrad of stride 1 the flipped one.
inline const char* why_not_depthwise_rows(const Conv2dShape& s, const Conv2dAddresses& addresses) {
  const bool is_square = s.r == s.s && (s.s == 3 || s.s == 5 || s.s == 7);
  if (s.k != s.c) return "several outputs per channel";
  if (!is_square) return "a window other than 3x3, 5x5, 7x7";
  if (s.stride_h != s.stride_w || s.stride_w > 2) return "a stride other than 1 and 2";
  if (s.dilation_h != 1 || s.dilation_w != 1) return "dilation";
  if (s.dtype == DType::kFloat64) return "float64";
  if (s.c * dtype_size(s.dtype) % 16 != 0) return "channels that are not whole 16-byte vectors";
  if (!addresses.are_multiples_of(16)) return "addresses that are not multiples of 16";
  if (s.n * s.h * s.w * s.p * s.q == 0) return "an empty tensor";
  return nullptr;
}

inline std::string describe(const DepthwiseRowsConfig& config) {
  const DepthwiseRowsWalk& walk = config.walk;
  std::string text = "sm_90a depthwise kernel, FMA: ";
  if (config.flip) text += "flipped window, ";
  text += "rows of " + std::to_string(walk.box_channels) + " channels x " +
          std::to_string(walk.box_cols) + " columns by TMA";
  if (config.direction == ConvDirection::kWgrad) {
    text += ", sums in " + std::to_string(walk.parts) + " parts";
  }
  if (config.reason != nullptr) text += std::string(" (") + config.reason + ")";
  return text;
}

#ifdef WARPWRIGHT_WITH_CUDA
// T: bf16, half or float. fprop, or with config.flip the dgrad of stride 1 that it is.
template <class T>
void launch_depthwise_rows_fprop(const Conv2dParams& params, const DepthwiseRowsConfig& config,
                                 cudaStream_t stream);
// dgrad of stride 2.
template <class T>
void launch_depthwise_rows_dgrad(const Conv2dBackwardParams& params,
                                 const DepthwiseRowsConfig& config, cudaStream_t stream);
// Writes the parts' sums; launch_direct_wgrad_sum() adds them.
template <class T>
void launch_depthwise_rows_wgrad(const Conv2dBackwardParams& params,
                                 const DepthwiseRowsConfig& config, void* workspace,
                                 cudaStream_t stream);
#endif

}  // namespace warpwright
