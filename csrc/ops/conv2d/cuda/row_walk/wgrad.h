// The configuration of wgrad of 3x3 windows with stride 1 on sm_90a, for images of few channels
// (wgrad_sm90.cuh). Rows of x and dy come to shared memory once per walk, not once per tap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "ops/conv2d/cuda/row_walk/row_walk.h"

namespace warpwright {

constexpr int kWalkRun = 64;         // outputs of a step, at most
constexpr int kWalkMaxSegments = 8;  // of a run
constexpr int kWalkFilters = 64;     // of a CTA
constexpr int walk_grad_channels(bool tf32) { return tf32 ? 32 : 64; }  // the same

// How the pixels are cut. A segment is a row of dy in an image, or one of `parts` equal runs of it.
// A strip is as many segments, side by side, as a run holds. A CTA walks a strip down `part_rows`
// rows of dy.
struct WalkGradShape {
  int images, height;  // of x
  int p;               // rows of dy per image
  int channels, filters;
  int pad_h, pad_w;
  int parts, part_columns;  // segments of a row, and their columns
  int strip_segments;
  int strips, row_parts, part_rows;
  int filter_groups, channel_groups;  // a CTA has one of each
  int ctas_per_group;                 // of filters and channels

  constexpr int units() const { return strips * row_parts; }
  constexpr int run() const { return strip_segments * part_columns; }
  constexpr int groups() const { return filter_groups * channel_groups; }
  constexpr int pitch_k() const { return filter_groups * kWalkFilters; }
};

struct RowWalkWgradConfig {
  GemmKind kind;  // k16Bit or kTf32
  WalkGradShape shape;
  const char* reason;
};

// ---- choice ----

// Whole segments in a run. False if no cut fills half a run with at most kWalkMaxSegments: each is
// a load of its own, for each column of the window.
inline bool cut_runs(WalkGradShape& w, int q) {
  w.parts = ceil_div(q, kWalkRun);
  while (q % w.parts != 0 && q / w.parts > kWalkRun / 2) ++w.parts;
  w.part_columns = q / w.parts;
  w.strip_segments = kWalkRun / w.part_columns;
  return q % w.parts == 0 && w.strip_segments <= kWalkMaxSegments && w.run() * 2 > kWalkRun;
}

// Of the last SM, fitted to measured times; cuts the walks.
inline double estimate_row_walk_wgrad(WalkGradShape& w, bool tf32, int64_t walks_at_once) {
  constexpr double kFirst = 10000, kPerPart = 120, kPerStep = 200, kPerStepTf32 = 600;
  const double warpgroups = tf32 ? 2 : 3, products = ceil_div(w.run(), tf32 ? 8 : 16) * kWalkTaps;
  const double step = (tf32 ? kPerStepTf32 : kPerStep) + warpgroups * products * (kWalkFilters / 2);
  return cut_walks(w, [&](int rows, int64_t units) {
    const int64_t steps = ceil_div(units, walks_at_once) * (rows + kWalkTaps - 1);
    const auto parts = static_cast<double>(std::min(units, walks_at_once));
    return kFirst + kPerPart * parts + static_cast<double>(steps) * step;
  });
}

// Of the kernel that sums dy: a launch, and the bytes of dy.
inline double bias_grad_cycles(const Conv2dShape& s, const DeviceInfo& device) {
  constexpr double kLaunch = 6000;
  const auto bytes = static_cast<double>(s.n * s.p * s.q * s.k * dtype_size(s.dtype));
  return kLaunch + bytes / device.memory_bytes_per_cycle();
}

// None if another kernel takes it. `sums`: the bias gradient, null if it is not wanted.
// `other_cycles`: the estimate of that kernel.
inline std::optional<RowWalkWgradConfig> choose_row_walk_wgrad(const Conv2dShape& s,
                                                               const Conv2dAddresses& addresses,
                                                               const void* sums,
                                                               double other_cycles,
                                                               const DeviceInfo& device) {
  if (!takes_row_walk(s, addresses)) return std::nullopt;
  RowWalkWgradConfig config{.kind = gemm_kind(s)};
  WalkGradShape& w = config.shape;
  w = {.images = static_cast<int>(s.n),
       .height = static_cast<int>(s.h),
       .p = static_cast<int>(s.p),
       .channels = static_cast<int>(s.c),
       .filters = static_cast<int>(s.k),
       .pad_h = static_cast<int>(s.pad_h),
       .pad_w = static_cast<int>(s.pad_w)};
  if (!cut_runs(w, static_cast<int>(s.q))) return std::nullopt;
  w.strips = static_cast<int>(ceil_div<int64_t>(s.n * w.parts, w.strip_segments));
  const bool tf32 = config.kind == GemmKind::kTf32;
  w.filter_groups = static_cast<int>(ceil_div<int64_t>(s.k, kWalkFilters));
  w.channel_groups = static_cast<int>(ceil_div<int64_t>(s.c, walk_grad_channels(tf32)));
  // The kernel that adds the sums writes single elements: it is slow for large weights.
  if (w.filter_groups > 2 || w.channel_groups > 2) return std::nullopt;
  const int64_t at_once = std::max(1, device.num_sms / w.groups());
  double cycles = estimate_row_walk_wgrad(w, tf32, at_once);
  w.ctas_per_group = static_cast<int>(std::min<int64_t>(w.units(), at_once));
  // Another kernel of 16 bits sums the bias gradient as it reads dy.
  if (sums != nullptr && !tf32) cycles += bias_grad_cycles(s, device);
  if (cycles > other_cycles) return std::nullopt;
  config.reason = "a 3x3 window of stride 1, and few channels";
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape& s, const RowWalkWgradConfig& config) {
  const WalkGradShape& w = config.shape;
  return w.ctas_per_group * (s.c * s.taps() + 1) * w.pitch_k() * int64_t{4};
}

inline std::string describe(const RowWalkWgradConfig& config) {
  const WalkGradShape& w = config.shape;
  return std::string("sm_90a ") + (config.kind == GemmKind::kTf32 ? "TF32" : "16-bit") +
         " wgmma, walks down the images: runs of " + std::to_string(w.run()) + " pixels, " +
         std::to_string(w.part_rows) + " rows per walk, sums in " +
         std::to_string(w.ctas_per_group) + " parts (" + config.reason + ")";
}

}  // namespace warpwright
