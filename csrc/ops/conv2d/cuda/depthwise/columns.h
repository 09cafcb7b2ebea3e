// Depthwise convolutions of channels-last 16-bit images by tensor cores on sm_90a, stride 1
// (columns_sm90.cuh). For one channel and one row of the window, eight neighbouring outputs are a
// product of the input's columns with a banded matrix of the weights.
#pragma once

#include <algorithm>
#include <string>

#include "common/ceil_div.h"
#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

constexpr int kColumnsChannels = 32;  // per CTA: 64 bytes of a pixel
constexpr int kColumnsThreads = 256;  // a warp has four channels
constexpr int kColumnsSegments = 16;  // rows of the product: segments of eight outputs
constexpr int kColumnsRun = 8;        // outputs per segment
constexpr int kColumnsStages = 6;
constexpr int kColumnsOutputs = 3;                  // buffers of y
constexpr int kColumnsSumsBytes = 8 * 4 * 128 * 4;  // wgrad: one product of each warp and channel

// How CTAs walk an image; a kernel argument. A box is one row of `box_cols` pixels of `images`
// images and 32 channels; it has segments x images rows of the product.
struct DepthwiseColumnsWalk {
  int chunks, segments, images, box_cols;
  int col_tiles, row_tiles, tile_rows;
  int units, parts;  // a unit is one box walking down tile_rows; parts: CTAs per chunk
  int stage_bytes, x_bytes, output_bytes;  // wgrad: a stage has a row of x, then one of dy
};

struct DepthwiseColumnsConfig {
  bool is_wgrad;
  bool flip;  // dgrad: the forward of the flipped window
  int taps;
  DepthwiseColumnsWalk walk;

  int64_t smem_bytes() const {
    const int64_t rest = is_wgrad ? kColumnsSumsBytes : kColumnsOutputs * walk.output_bytes;
    return int64_t{kColumnsStages} * walk.stage_bytes + rest + 512;  // 512: the swizzle's alignment
  }
};

// Why the kernels of rows and not these compute a problem that both could, by FMA; null: these.
// `direction` is fprop for a flipped dgrad.
inline const char* why_depthwise_rows(ConvDirection direction, const Conv2dShape& s) {
  if (s.dtype == DType::kFloat32) return "float32: tensor cores would round";
  if (s.stride_w == 2 || direction == ConvDirection::kDgrad) {
    return "stride 2: FMA keeps up with the bytes";
  }
  if (s.s == 3) return "3x3: FMA keeps up with the bytes";
  return nullptr;
}

inline DepthwiseColumnsConfig choose_depthwise_columns(const Conv2dShape& s, bool is_wgrad,
                                                       bool flip, const DeviceInfo& device) {
  const int taps = static_cast<int>(s.s);
  DepthwiseColumnsWalk walk{};
  walk.chunks = static_cast<int>(ceil_div<int64_t>(s.c, kColumnsChannels));
  const int all = static_cast<int>(ceil_div<int64_t>(s.q, kColumnsRun));
  walk.col_tiles = ceil_div(all, kColumnsSegments);
  walk.segments = ceil_div(all, walk.col_tiles);
  walk.images = walk.col_tiles > 1 ? 1 : kColumnsSegments / walk.segments;
  // Rows of the product that a warp reads together are spread over the banks by an odd pitch, or by
  // half of the swizzle's period.
  walk.box_cols = walk.segments * kColumnsRun + taps - 1;
  while (walk.box_cols % 8 != 4 && !(walk.images >= 4 && walk.box_cols % 2 == 1)) ++walk.box_cols;
  walk.x_bytes = ceil_div(walk.images * walk.box_cols * 64, 512) * 512;
  walk.output_bytes = ceil_div(walk.images * walk.segments * kColumnsRun * 64, 512) * 512;
  walk.stage_bytes = walk.x_bytes + (is_wgrad ? walk.output_bytes : 0);
  const int64_t columns = walk.col_tiles * ceil_div<int64_t>(s.n, walk.images);
  const int64_t ctas = std::max(1, device.num_sms / walk.chunks);
  int64_t tiles = 1;
  if (!is_wgrad && columns < 4 * ctas) {
    tiles = std::max<int64_t>(1, std::min(ceil_div(4 * ctas, columns), s.p / 14));
  }
  walk.tile_rows = static_cast<int>(ceil_div(s.p, tiles));
  walk.row_tiles = static_cast<int>(ceil_div<int64_t>(s.p, walk.tile_rows));
  walk.units = static_cast<int>(columns * walk.row_tiles);
  walk.parts = static_cast<int>(std::clamp<int64_t>(ctas, 1, walk.units));
  return {is_wgrad, flip, taps, walk};
}

inline int64_t workspace_bytes(const Conv2dShape& s, const DepthwiseColumnsConfig& config) {
  return config.is_wgrad ? config.walk.parts * (s.taps() + 1) * s.c * int64_t{4} : 0;
}

inline std::string describe(const DepthwiseColumnsConfig& config) {
  const DepthwiseColumnsWalk& walk = config.walk;
  std::string text = "sm_90a depthwise kernel, 16-bit mma.sync: ";
  if (config.flip) text += "flipped window, ";
  text +=
      "banded weights, rows of 32 channels x " + std::to_string(walk.box_cols) + " columns by TMA";
  if (config.is_wgrad) text += ", sums in " + std::to_string(walk.parts) + " parts";
  const std::string taps = std::to_string(config.taps);
  return text + " (" + taps + "x" + taps + ": FMA would take longer than the bytes)";
}

#ifdef WARPWRIGHT_WITH_CUDA
// T: bf16 or half. fprop, or with config.flip the dgrad that it is.
template <class T>
void launch_depthwise_columns_fprop(const Conv2dParams& params,
                                    const DepthwiseColumnsConfig& config, cudaStream_t stream);
// Writes the parts' sums; launch_direct_wgrad_sum() adds them.
template <class T>
void launch_depthwise_columns_wgrad(const Conv2dBackwardParams& params,
                                    const DepthwiseColumnsConfig& config, void* workspace,
                                    cudaStream_t stream);
#endif

}  // namespace warpwright
