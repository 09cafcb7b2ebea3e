// How a convolution by Fourier transforms is computed: sizes, tiles, kernels, memory and the time
// that a model expects. The same model decides conv2d's algorithm="auto".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>

#include "ops/fft_conv/fft_conv.h"

namespace warpwright {

enum class FftConvKind {
  kRows,    // a pair of tiles of a row in shared memory
  kPlanes,  // a pair of tiles of a plane in shared memory
  kLong,    // rows of n1 x 4096 points in three passes
  kChain,   // copies, ATen's transforms, products
};

constexpr int kFftRowPoints[] = {256, 512, 1024, 2048, 4096, 8192, 16384};
constexpr int kFftPlanePoints[] = {48, 64, 80, 96, 112, 128};
constexpr int kFftLongRow = 4096;
constexpr int kFftLongColumns[] = {16, 32, 64, 128, 256, 512};  // n1
constexpr int64_t kFftRowsPerBlock = 4096;                      // points of the rows of a block
// A gradient keeps two tiles in shared memory, and 16 sums per thread.
constexpr int kFftMostGradientRow = 8192, kFftMostGradientPlane = 96;
// Of long rows: what stays in L2 between the passes.
constexpr int64_t kFftLongBytes = int64_t{24} << 20;

// With so few pairs per channel, each transforms the kernel's rows itself.
constexpr int64_t kFftFewPairs = 2;

// Columns that a block of a long row's first and third pass takes: a thread then has 16 points of
// the last stage, and a row 128 bytes or more.
constexpr int64_t fft_column_group(int64_t n1) { return n1 >= 256 ? 16 : 4096 / n1; }

// Where the parts of the workspace begin.
struct FftConvRegions {
  int64_t roots = 0, spectrum = 0, flags = 0, work = 0, gradient = 0, bytes = 0;
};

struct FftConvPlan {
  FftConvKind kind = FftConvKind::kChain;
  FftAxis axes[2];
  int64_t tiles = 0;               // of a channel, all images
  int64_t pairs = 0;               // of those
  int64_t pairs_per_block = 1;     // of a channel
  int64_t blocks_per_channel = 1;  // of a gradient: partial sums
  int64_t channels_at_once = 0;    // of long rows
  FftConvRegions regions;
  double seconds = 0;  // expected
  int64_t memory = 0;  // all temporary tensors
  const char* reason = "";

  int64_t points() const { return axes[0].points * axes[1].points; }
  // Flags per unit of spoilt tiles: a block of the last pass writes one.
  int64_t flag_parts() const {
    if (kind != FftConvKind::kLong) return 1;
    return kFftLongRow / fft_column_group(points() / kFftLongRow);
  }
};

// ---- sizes and tiles ----

// Whether one tile of `points` elements gives all results of a dimension. A window that leaves the
// tile on the right enters it on the left, which must then be padding.
inline bool is_whole(const FftConvShape& s, int dim, int64_t points) {
  const int64_t span = s.results[dim] + s.taps[dim] - 1, pad = s.pad[dim];
  if (points < s.results[dim] || points < s.taps[dim]) return false;
  return span <= points ||
         (s.extent[dim] + pad <= points && span - std::max<int64_t>(pad, 0) <= points);
}

inline std::optional<FftAxis> axis_of(const FftConvShape& s, int dim, int64_t points) {
  FftAxis axis{.points = points,
               .extent = s.extent[dim],
               .results = s.results[dim],
               .step = points - s.taps[dim] + 1,
               .start = -s.pad[dim]};
  if (is_whole(s, dim, points)) axis.step = s.results[dim];
  if (axis.step < 1) return std::nullopt;
  axis.tiles = ceil_div(axis.results, axis.step);
  return axis;
}

// The smallest even product of 2, 3, 5 and 7 from `points` on: even, because the transform back to
// real numbers is then one of half as many complex ones.
inline int64_t good_fft_size(int64_t points) {
  int64_t best = 2;
  while (best < points) best *= 2;
  for (int64_t seven = 1; seven <= best; seven *= 7) {
    for (int64_t five = seven; five <= best; five *= 5) {
      for (int64_t three = five; three <= best; three *= 3) {
        int64_t size = three * 2;
        while (size < points) size *= 2;
        best = std::min(best, size);
      }
    }
  }
  return best;
}

// ---- the model ----

// Of an H100, by the races of docs/kernels/fft_conv.md.
constexpr double kFftCallSeconds = 1e-5;  // launches, tables, the kernels' spectra
constexpr double kFftCopyBytesPerSecond = 2.8e12;
constexpr double kChainBytesPerSecond = 1.6e12;
constexpr double kFmaFlopsPerSecond = 6.2e13;

// Of a pair of tiles, per point, on 132 SMs.
inline double fused_seconds_per_point(const FftConvShape& s, const FftConvPlan& plan) {
  const int64_t points = plan.points();
  switch (plan.kind) {
    case FftConvKind::kRows:
      if (s.is_gradient) return points > 4096 ? 18.4e-12 : 10.4e-12;
      return points > 8192   ? 15.6e-12
             : points > 4096 ? 13.2e-12
             : points > 1024 ? 9.2e-12
                             : 10.4e-12;
    case FftConvKind::kPlanes:
      if (s.is_gradient) return points == 64 * 64 ? 8.2e-12 : points == 96 * 96 ? 9.8e-12 : 13e-12;
      return points < 64 * 64 ? 8e-12 : points < 96 * 96 ? 7.5e-12 : 6.9e-12;
    default:
      return 25e-12;
  }
}

// Of the CPU: what moving a point costs in FLOPs of the transform, and how much faster a FLOP of a
// direct kernel is than one of a transform.
constexpr double kCpuCopyFlops = 20;
constexpr double kCpuDirectAdvantage = 4;

inline double transform_flops(double points) { return 5 * points * std::log2(points); }

inline double fused_seconds(const FftConvShape& s, const FftConvPlan& plan) {
  // Long kernels are transformed as a pair is.
  const int64_t kernels = plan.kind == FftConvKind::kLong && !s.is_gradient ? 1 : 0;
  const double points = static_cast<double>((plan.pairs + kernels) * s.groups * plan.points());
  const double elements =
      static_cast<double>(s.images * s.groups) *
      static_cast<double>(s.extent[0] * s.extent[1] + s.results[0] * s.results[1]);
  const double copy = elements * static_cast<double>(dtype_size(s.dtype)) / kFftCopyBytesPerSecond;
  return kFftCallSeconds + std::max(copy, points * fused_seconds_per_point(s, plan));
}

// Planes of the chain: signal, kernel and output in float, and their spectra; cuFFT copies the
// last.
inline int64_t chain_bytes(const FftConvShape& s, const FftConvPlan& plan, int64_t accesses) {
  const int64_t size = s.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t spectrum = 2 * plan.axes[0].points * (plan.axes[1].points / 2 + 1);
  const int64_t per_plane = size * (plan.points() + spectrum);
  const int64_t kernels = s.groups * s.to * s.from;
  return accesses * per_plane * (plan.tiles * s.groups * (s.from + s.to) + kernels);
}

inline double chain_seconds(const FftConvShape& s, const FftConvPlan& plan) {
  // Written by the copy and read by the transform, twice for planes; then the same backwards.
  const int64_t accesses = s.is_rows() ? 2 : 3;
  const double bytes = static_cast<double>(chain_bytes(s, plan, accesses));
  const double products = 8.0 * static_cast<double>(plan.tiles * s.groups * s.from * s.to) *
                          static_cast<double>(plan.points() / 2 + plan.axes[0].points);
  return 3 * kFftCallSeconds + bytes / kChainBytesPerSecond + products / (kFmaFlopsPerSecond / 2);
}

// The least that a direct kernel needs for products with elements (padding costs nothing): FMA of
// depthwise convolutions, tensor cores of others in 16 bits or TF32. No kernel is faster, so a
// transform that is expected below this is a gain.
inline double direct_floor_seconds(const FftConvShape& s, bool tf32) {
  double products = static_cast<double>(s.images * s.groups) * static_cast<double>(s.from * s.to);
  for (int dim = 0; dim < 2; ++dim) {
    double inside = 0;  // pairs of a result and a tap whose element exists
    for (int64_t tap = 0; tap < s.taps[dim]; ++tap) {
      const int64_t move = tap - s.pad[dim];
      const int64_t last = std::min(s.results[dim], s.extent[dim] - move);
      inside += static_cast<double>(std::max<int64_t>(0, last - std::max<int64_t>(0, -move)));
    }
    products *= inside;
  }
  const bool on_tensor_cores =
      !s.is_depthwise() && s.dtype != DType::kFloat64 && (s.dtype != DType::kFloat32 || tf32);
  const double flops = !on_tensor_cores             ? kFmaFlopsPerSecond
                       : s.dtype == DType::kFloat32 ? 3.5e14
                                                    : 7e14;
  return 2 * products / (s.dtype == DType::kFloat64 ? flops / 2 : flops);
}

// ---- choice ----

inline void set_tiles(const FftConvShape& s, FftConvPlan& plan) {
  plan.tiles = s.images * plan.axes[0].tiles * plan.axes[1].tiles;
  plan.pairs = ceil_div<int64_t>(plan.tiles, 2);
}

// Keeps the faster of two plans.
inline void offer(const FftConvShape& s, std::optional<FftConvPlan>& best, FftConvKind kind,
                  const std::optional<FftAxis>& down, const std::optional<FftAxis>& across) {
  if (!down || !across) return;
  FftConvPlan plan;
  plan.kind = kind;
  plan.axes[0] = *down;
  plan.axes[1] = *across;
  set_tiles(s, plan);
  plan.seconds = kind == FftConvKind::kChain ? chain_seconds(s, plan) : fused_seconds(s, plan);
  if (!best || plan.seconds < best->seconds) best = plan;
}

// Sizes for a dimension of the chain: the whole signal, or tiles of two to sixteen kernels.
template <class F>
void for_chain_sizes(const FftConvShape& s, int dim, F&& f) {
  const int64_t span = s.results[dim] + s.taps[dim] - 1;
  const int64_t padded = std::max({s.extent[dim] + s.pad[dim], s.results[dim], s.taps[dim],
                                   span - std::max<int64_t>(s.pad[dim], 0)});
  const int64_t whole = std::min(std::max(padded, s.taps[dim]), span);
  f(span == 1 ? 1 : good_fft_size(whole));
  for (int64_t size = good_fft_size(2 * s.taps[dim]); size <= 16 * s.taps[dim] && size < whole;
       size = good_fft_size(2 * size)) {
    f(size);
  }
}

inline FftConvPlan choose_fft_chain(const FftConvShape& s) {
  std::optional<FftConvPlan> best;
  for_chain_sizes(s, 0, [&](int64_t rows) {
    for_chain_sizes(s, 1, [&](int64_t cols) {
      offer(s, best, FftConvKind::kChain, axis_of(s, 0, rows), axis_of(s, 1, cols));
    });
  });
  best->reason = "ATen's transforms";
  best->memory = chain_bytes(s, *best, 1);
  return *best;
}

// A block of a correlation has one pair, or as many rows as fit it. Those of a gradient share a
// channel's pairs, so that all are resident at once.
inline void set_blocks(const FftConvShape& s, FftConvPlan& plan, const DeviceInfo& device,
                       int64_t rows_at_once) {
  int64_t groups_per_block = 1;
  if (s.is_gradient) {
    const bool two_per_sm = plan.kind == FftConvKind::kRows && plan.points() <= 4096;
    const int64_t resident = (two_per_sm ? 2 : 1) * int64_t{device.num_sms};
    const int64_t parts = std::max<int64_t>(1, resident / s.groups);
    groups_per_block = ceil_div(ceil_div(plan.pairs, rows_at_once), parts);
  }
  plan.pairs_per_block = groups_per_block * rows_at_once;
  plan.blocks_per_channel = ceil_div(plan.pairs, plan.pairs_per_block);
}

inline int64_t round_up_to_256(int64_t bytes) { return ceil_div<int64_t>(bytes, 256) * 256; }

inline void set_regions(const FftConvShape& s, FftConvPlan& plan, int64_t rows_at_once) {
  FftConvRegions& r = plan.regions;
  int64_t end = 0;
  const auto reserve = [&](int64_t& region, int64_t bytes) {
    region = end;
    end += round_up_to_256(bytes);
  };
  const bool is_long = plan.kind == FftConvKind::kLong;
  reserve(r.roots, 8 * (is_long ? kFftLongRow : plan.axes[1].points));
  reserve(r.flags, plan.flag_parts() * s.groups * (s.is_gradient ? 1 : plan.pairs));
  const int64_t spectrum = 8 * plan.points();
  if (is_long) {
    const int64_t matrices = plan.channels_at_once * plan.pairs;
    reserve(r.work, matrices * spectrum);
    if (s.is_gradient) {
      reserve(r.gradient, matrices * spectrum);
    } else {
      reserve(r.spectrum, plan.channels_at_once * spectrum);
    }
  } else {
    const int64_t parts_per_channel = s.is_gradient ? plan.blocks_per_channel * rows_at_once : 1;
    reserve(r.spectrum, s.groups * parts_per_channel * spectrum);
  }
  r.bytes = end;
  plan.memory = end;
}

// The fused kernel for a depthwise convolution, if one fits.
inline std::optional<FftConvPlan> choose_fft_fused(const FftConvShape& s,
                                                   const DeviceInfo& device) {
  if (!s.is_depthwise() || s.dtype == DType::kFloat64) return std::nullopt;
  std::optional<FftConvPlan> best;
  if (s.is_rows()) {
    for (const int points : kFftRowPoints) {
      if (s.is_gradient && points > kFftMostGradientRow) continue;
      offer(s, best, FftConvKind::kRows, FftAxis{}, axis_of(s, 1, points));
    }
    for (const int columns : kFftLongColumns) {
      const int64_t points = int64_t{columns} * kFftLongRow;
      offer(s, best, FftConvKind::kLong, FftAxis{}, axis_of(s, 1, points));
    }
  } else {
    for (const int points : kFftPlanePoints) {
      if (s.is_gradient && points > kFftMostGradientPlane) continue;
      offer(s, best, FftConvKind::kPlanes, axis_of(s, 0, points), axis_of(s, 1, points));
    }
  }
  if (!best) return best;
  FftConvPlan& plan = *best;
  const int64_t rows_at_once =
      plan.kind == FftConvKind::kRows ? std::max<int64_t>(1, kFftRowsPerBlock / plan.points()) : 1;
  if (plan.kind == FftConvKind::kLong) {
    const int64_t per_channel = 8 * plan.points() * (plan.pairs + 1);
    plan.channels_at_once = std::clamp<int64_t>(kFftLongBytes / per_channel, 1, s.groups);
  }
  set_blocks(s, plan, device, rows_at_once);
  set_regions(s, plan, rows_at_once);
  plan.reason = plan.kind == FftConvKind::kRows     ? "fused: pairs of tiles in shared memory"
                : plan.kind == FftConvKind::kPlanes ? "fused: pairs of planes in shared memory"
                                                    : "fused: long rows in three passes";
  return best;
}

// `device`: of the GPU, or null for the CPU.
inline FftConvPlan choose_fft_conv(const FftConvShape& s, const DeviceInfo* device) {
  const FftConvPlan chain = choose_fft_chain(s);
  if (device == nullptr) return chain;
  const std::optional<FftConvPlan> fused = choose_fft_fused(s, *device);
  return fused && fused->seconds <= chain.seconds ? *fused : chain;
}

inline std::string describe(const FftConvPlan& plan) {
  const auto number = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", value);
    return std::string(text);
  };
  const auto size = [&](int64_t rows, int64_t cols) {
    return rows == 1 ? std::to_string(cols) : std::to_string(rows) + " x " + std::to_string(cols);
  };
  return std::string(plan.reason) + ", " + std::to_string(plan.tiles) + " tiles per channel of " +
         size(plan.axes[0].points, plan.axes[1].points) + " points with " +
         size(plan.axes[0].step, plan.axes[1].step) + " results, " +
         number(static_cast<double>(plan.memory) / (1 << 20)) + " MiB of memory";
}

// What the model expects of the transform, and the least that direct convolution needs.
inline std::string describe_times(const FftConvShape& s, const FftConvPlan& plan, bool tf32) {
  char text[96];
  std::snprintf(text, sizeof text, "expected %.3g ms, a direct kernel at least %.3g ms",
                1e3 * plan.seconds, 1e3 * direct_floor_seconds(s, tf32));
  return text;
}

// Whether the transform is expected to be faster than any direct kernel can be. On the CPU, whether
// it needs so much less arithmetic that it outweighs its lower rate.
inline bool fft_conv_pays(const FftConvShape& s, const DeviceInfo* device, bool tf32) {
  const FftConvPlan plan = choose_fft_conv(s, device);
  if (device != nullptr) return 1.2 * plan.seconds < direct_floor_seconds(s, tf32);
  const double planes = static_cast<double>(plan.tiles * s.groups * (s.from + s.to));
  const double products = 4.0 * static_cast<double>(plan.tiles * s.groups * s.from * s.to);
  const double points = static_cast<double>(plan.points());
  const double transforms = planes * (transform_flops(points) / 2 + kCpuCopyFlops * points);
  const double direct = direct_floor_seconds(s, false) * kFmaFlopsPerSecond;
  return kCpuDirectAdvantage * (transforms + products * points) < direct;
}

#ifdef WARPWRIGHT_WITH_CUDA
// A fused plan. `workspace`: plan.regions.bytes.
void launch_fft_conv(const FftConvParams& params, const FftConvPlan& plan, void* workspace,
                     cudaStream_t stream);
#endif

}  // namespace warpwright
