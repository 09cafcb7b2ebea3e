// The configuration of fprop and dgrad of 3x3 windows with stride 1 on sm_90a, for images of few
// channels (row_walk_sm90.cuh). Each row of the image comes to shared memory once, in place of once
// per tap. The weights stay in shared memory, so they must fit there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "common/ceil_div.h"
#include "ops/conv2d/cuda/sm90/config.h"

namespace warpwright {

constexpr int kWalkTaps = 3;      // per side of the window
constexpr int kWalkWindows = 64;  // of a half: the rows of a warpgroup's product
constexpr int kWalkHalfPlaces = kWalkWindows + kWalkTaps - 1;
constexpr int kWalkBufferBytes = kWalkWindows * 128;  // of 16-bit outputs, per warpgroup
constexpr int kWalkMaxStages = 8;

// How the outputs are cut. A *segment* is a run of outputs in a row of an image: the row, or one of
// its `parts`. A *strip* is as many segments as its two halves of 64 windows hold, of neighbouring
// images. A CTA walks a strip down `part_rows` rows of outputs. In shared memory a pixel is a
// *place* of 128 bytes.
struct WalkShape {
  int images, height;  // of the image of windows
  int p, q;            // rows and columns of D per image
  int pad_h, pad_w;
  int channels;  // of D
  int chunks;    // of the image's channels, 128 bytes each
  int chunk_channels;
  int parts, part_columns;  // segments of a row, and their columns (the last may have fewer)
  int segments;             // of the batch
  int strip_segments;
  int half_segments;  // 0: the halves share one run of places, and segments may lie in both
  int pitch;          // places from one segment to the next
  int strips, row_parts, part_rows;
  int groups;  // of the columns of D; a CTA has one
  int stages;

  // Of a stage: one chunk of channels of a strip's row.
  constexpr int stage_bytes() const {
    return (half_segments > 0 ? 2 * kWalkHalfPlaces : kWalkWindows + kWalkHalfPlaces) * 128;
  }
  constexpr int units() const { return strips * row_parts; }
  constexpr int box_columns() const { return part_columns + kWalkTaps - 1; }
  constexpr int place(int segment) const {
    const bool second = half_segments > 0 && segment >= half_segments;
    return second ? kWalkHalfPlaces + (segment - half_segments) * pitch : segment * pitch;
  }
};

struct RowWalkConfig {
  ConvDirection direction;
  GemmKind kind;  // k16Bit or kTf32
  int columns;    // of D per CTA: 64 or 32
  unsigned ctas;
  WalkShape shape;
  const char* reason;

  // Weights, buffers, stages, barriers, and what the alignment may take.
  int smem_bytes() const {
    constexpr int kAlignment = 1024, kBarriers = 8 * (2 * kWalkMaxStages + 1);
    const int weights = kWalkTaps * kWalkTaps * shape.chunks * columns * 128;
    return kAlignment + weights + 2 * kWalkBufferBytes + shape.stages * shape.stage_bytes() +
           kBarriers;
  }
};

// ---- choice ----

// The windows' axes along one direction of the product: those of x, or for dgrad those of dy.
inline WindowAxes walk_axes(ConvDirection direction, const Conv2dShape& s) {
  const WindowAxes x = window_axes(s);
  if (direction == ConvDirection::kFprop) return x;
  return {dgrad_axis(x[0], 0), dgrad_axis(x[1], 0)};
}

inline bool takes_row_walk(const Conv2dShape& s, const Conv2dAddresses& addresses) {
  constexpr int64_t kMaxExtent = int64_t{1} << 30;  // places are 32-bit
  const int64_t vec = 16 / dtype_size(s.dtype);
  const bool is_window = s.r == kWalkTaps && s.s == kWalkTaps && s.stride_h == 1 &&
                         s.stride_w == 1 && s.dilation_h == 1 && s.dilation_w == 1 &&
                         s.pad_h < kWalkTaps && s.pad_w < kWalkTaps;
  return s.sm90 && has_tma_im2col_type(s) && s.channels_last && s.groups == 1 && is_window &&
         addresses.are_multiples_of(16) && s.c % vec == 0 && s.k % vec == 0 &&
         std::max(s.n * s.h * s.w, s.n * s.p * s.q) <= kMaxExtent;
}

// Cuts rows of q outputs for `span` windows; returns the segments in a span.
inline int cut_rows(WalkShape& w, int span) {
  w.parts = static_cast<int>(ceil_div(w.q, span));
  w.part_columns = static_cast<int>(ceil_div(w.q, w.parts));
  // Neighbouring images share their padding.
  w.pitch = w.box_columns() - (w.parts == 1 ? w.pad_w : 0);
  return (span - w.part_columns) / w.pitch + 1;
}

// Shared halves or separate ones, whichever needs fewer strips.
inline void cut_strips(WalkShape& w) {
  WalkShape shared = w, separate = w;
  shared.half_segments = 0;
  shared.strip_segments = cut_rows(shared, 2 * kWalkWindows);
  separate.half_segments = cut_rows(separate, kWalkWindows);
  separate.strip_segments = 2 * separate.half_segments;
  for (WalkShape* cut : {&shared, &separate}) {
    cut->segments = cut->images * cut->parts;
    cut->strips = static_cast<int>(ceil_div(cut->segments, cut->strip_segments));
  }
  w = separate.strips < shared.strips ? separate : shared;
}

// Cuts the walks to the number of rows that costs least. cost(rows, units): cycles of the last SM.
template <class Shape, class Cost>
double cut_walks(Shape& w, const Cost& cost) {
  double least = -1;
  for (int parts = 1; parts <= std::min(w.p, 64); ++parts) {
    const int rows = static_cast<int>(ceil_div(w.p, parts));
    const int row_parts = static_cast<int>(ceil_div(w.p, rows));
    const double cycles = cost(rows, int64_t{w.strips} * row_parts);
    if (least >= 0 && cycles >= least) continue;
    least = cycles;
    w.row_parts = row_parts;
    w.part_rows = rows;
  }
  return least;
}

// Of the last SM, fitted to measured times; cuts the walks. A part of the rows begins with two rows
// whose outputs belong to the part before.
inline double estimate_row_walk(RowWalkConfig& config, int64_t walks_at_once) {
  constexpr double kFirst = 6000, kPerStep = 600;
  // Two warpgroups multiply in turn, 4 products for each column of the window and chunk.
  const double products = 2.0 * kWalkTaps * 4 * config.shape.chunks;
  const double step = kPerStep + products * (kWalkTaps * config.columns / 2);
  return cut_walks(config.shape, [&](int rows, int64_t units) {
    const int64_t more = rows < config.shape.p ? kWalkTaps - 1 : 0;
    return kFirst + static_cast<double>(ceil_div(units, walks_at_once) * (rows + more)) * step;
  });
}

// None if another kernel takes it. `other_cycles`: the estimate of that kernel.
inline std::optional<RowWalkConfig> choose_row_walk(ConvDirection direction, const Conv2dShape& s,
                                                    const Conv2dAddresses& addresses,
                                                    double other_cycles, const DeviceInfo& device) {
  if (!takes_row_walk(s, addresses)) return std::nullopt;
  const bool fprop = direction == ConvDirection::kFprop;
  const auto [height, width] = walk_axes(direction, s);
  const int64_t columns = fprop ? s.k : s.c, channels = fprop ? s.c : s.k;
  RowWalkConfig config{.direction = direction, .kind = gemm_kind(s)};
  // The rows of MN-major weights in shared memory have 64 columns.
  const bool k_major = fprop || config.kind == GemmKind::kTf32;
  config.columns = k_major && columns <= 32 ? 32 : 64;
  WalkShape& w = config.shape;
  w = {.images = static_cast<int>(s.n),
       .height = static_cast<int>(height.size),
       .p = static_cast<int>(height.windows),
       .q = static_cast<int>(width.windows),
       .pad_h = static_cast<int>(height.pad),
       .pad_w = static_cast<int>(width.pad),
       .channels = static_cast<int>(columns),
       .chunks = static_cast<int>(ceil_div(channels, conv_chunk(s.dtype))),
       .chunk_channels = static_cast<int>(conv_chunk(s.dtype))};
  w.groups = static_cast<int>(ceil_div<int64_t>(columns, config.columns));
  cut_strips(w);
  w.stages = kWalkMaxStages;
  while (w.stages >= 2 * w.chunks && config.smem_bytes() > device.smem_per_block) --w.stages;
  if (w.stages < 2 * w.chunks || w.groups > device.num_sms) return std::nullopt;
  const int64_t at_once = std::max(1, device.num_sms / w.groups);
  if (estimate_row_walk(config, at_once) > other_cycles) return std::nullopt;
  config.ctas = static_cast<unsigned>(std::min<int64_t>(w.units(), at_once) * w.groups);
  config.reason = "a 3x3 window of stride 1, and all weights fit in shared memory";
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape&, const RowWalkConfig&) { return 0; }

inline std::string describe(const RowWalkConfig& config) {
  const WalkShape& w = config.shape;
  return std::string("sm_90a ") + (config.kind == GemmKind::kTf32 ? "TF32" : "16-bit") +
         " wgmma, walks down the images: " + std::to_string(w.strip_segments) +
         (w.parts > 1 ? " parts of a row" : " rows") + " of " + std::to_string(w.part_columns) +
         " outputs side by side, " + std::to_string(w.part_rows) + " rows per walk, " +
         std::to_string(config.columns) + " channels, " + std::to_string(w.stages) + " stages (" +
         config.reason + ")";
}

}  // namespace warpwright
