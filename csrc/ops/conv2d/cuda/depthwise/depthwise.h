// Depthwise convolutions that the direct kernels do not take: 3 x 3, 5 x 5 and 7 x 7 windows in
// NCHW (nchw.cuh), and the input gradient that gathers (dgrad.cu).
#pragma once

#include <optional>
#include <string>

#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

// ---- NCHW, square windows without dilation ----

constexpr int kDepthwiseTileRows = 4;  // outputs per thread: 4 rows of kRunQ

// The windows that have kernels of their own: their weights fit a thread's registers.
inline bool is_depthwise_window(const Conv2dShape& s) {
  return s.r == s.s && (s.s == 3 || s.s == 5 || s.s == 7) && s.dilation_h == 1 &&
         s.dilation_w == 1 && s.stride_h == s.stride_w && s.stride_w <= 2;
}

inline bool is_depthwise_nchw(const Conv2dShape& s) {
  return !s.channels_last && is_depthwise_window(s) && (s.s == 3 || s.dtype != DType::kFloat64) &&
         s.h * s.w > 0;
}

// Whether all columns of a thread's window except the first and the last are one aligned access.
inline bool depthwise_rows_are_vectors(const Conv2dShape& s, uintptr_t x) {
  return s.stride_w == 1 && 2 * s.pad_w + 1 == s.s && runs_are_vectors(s.dtype, s.w, kRunQ, x);
}

// `flip`: the weight's taps are read in reverse, for the input gradient with stride 1.
struct DepthwiseNchwFpropConfig {
  bool vectorized_x, vectorized_y;
  bool flip;
  int64_t tiles;  // of kDepthwiseTileRows x kRunQ outputs, one per thread
};

inline int64_t depthwise_nchw_tiles(const Conv2dShape& s) {
  return s.n * s.k * ceil_div<int64_t>(s.p, kDepthwiseTileRows) * ceil_div<int64_t>(s.q, kRunQ);
}

inline bool takes_depthwise_nchw_fprop(const Conv2dShape& s) {
  return is_depthwise_nchw(s) && depthwise_nchw_tiles(s) < (int64_t{1} << 30);
}

inline DepthwiseNchwFpropConfig choose_depthwise_nchw_fprop(const Conv2dShape& s, bool flip,
                                                            const Conv2dAddresses& addresses) {
  return {depthwise_rows_are_vectors(s, addresses.x),
          runs_are_vectors(s.dtype, s.q, kRunQ, addresses.y), flip, depthwise_nchw_tiles(s)};
}

inline std::string describe(const DepthwiseNchwFpropConfig& config) {
  return std::string("portable depthwise kernel, FMA") + (config.flip ? ", flipped window" : "") +
         ": tiles of 4x4 outputs of one NCHW plane";
}

// Input gradient of stride 2 and multiplier 1.
struct DepthwiseNchwDgradConfig {
  int64_t runs, strips;  // tiles along and down a plane, from an even place of the padded dx on
  int64_t tiles;
};

// None if another kernel takes the call.
inline std::optional<DepthwiseNchwDgradConfig> choose_depthwise_nchw_dgrad(const Conv2dShape& s) {
  if (!is_depthwise_nchw(s) || s.stride_w != 2 || s.k != s.c) return std::nullopt;
  const int64_t runs = ceil_div<int64_t>(s.w + s.pad_w % 2, kRunQ);
  const int64_t strips = ceil_div<int64_t>(s.h + s.pad_h % 2, kDepthwiseTileRows);
  const int64_t tiles = s.n * s.c * runs * strips;
  if (tiles == 0 || tiles >= (int64_t{1} << 30)) return std::nullopt;
  return DepthwiseNchwDgradConfig{runs, strips, tiles};
}

inline std::string describe(const DepthwiseNchwDgradConfig&) {
  return "portable depthwise kernel, FMA: tiles of 4x4 inputs of one NCHW plane, the four phases "
         "of "
         "stride 2 together";
}

struct DepthwiseNchwWgradConfig {
  bool vectorized;
  int parts;  // runs of images, whose sums a second kernel adds in order
};

inline DepthwiseNchwWgradConfig choose_depthwise_nchw_wgrad(const Conv2dShape& s,
                                                            const Conv2dAddresses& addresses,
                                                            const DeviceInfo& device) {
  return {runs_are_vectors(s.dtype, s.q, kRunQ, addresses.y) &&
              depthwise_rows_are_vectors(s, addresses.x),
          static_cast<int>(std::clamp<int64_t>(int64_t{device.num_sms} * 16 / s.k, 1,
                                               std::max<int64_t>(1, s.n)))};
}

inline int64_t workspace_bytes(const Conv2dShape& s, const DepthwiseNchwWgradConfig& config) {
  return config.parts * (s.taps() + 1) * s.k * accum_size(s.dtype);
}

inline std::string describe(const DepthwiseNchwWgradConfig& config) {
  return "portable depthwise kernel, FMA: one channel of a run of NCHW planes per block, sums in " +
         std::to_string(config.parts) + " parts";
}

// ---- input gradient of any stride and multiplier ----

struct DepthwiseDgradConfig {};

// With stride 1 and multiplier 1 the input gradient is the forward of the flipped window.
inline bool is_flipped_fprop(const Conv2dShape& s) {
  return s.stride_h == 1 && s.stride_w == 1 && s.k == s.c;
}
inline Conv2dShape flipped_shape(const Conv2dShape& s) {
  Conv2dShape flipped = s;
  std::swap(flipped.h, flipped.p);
  std::swap(flipped.w, flipped.q);
  flipped.pad_h = (s.r - 1) * s.dilation_h - s.pad_h;
  flipped.pad_w = (s.s - 1) * s.dilation_w - s.pad_w;
  return flipped;
}

inline std::string describe(const DepthwiseDgradConfig&) {
  return "portable depthwise kernel, FMA: gathers the outputs whose windows cover an input";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_depthwise_nchw_fprop(const Conv2dParams& params, const DepthwiseNchwFpropConfig& config,
                                 cudaStream_t stream);
void launch_depthwise_nchw_dgrad(const Conv2dBackwardParams& params,
                                 const DepthwiseNchwDgradConfig& config, cudaStream_t stream);
// Writes grad_weight and, if it is not null, grad_bias.
void launch_depthwise_nchw_wgrad(const Conv2dBackwardParams& params,
                                 const DepthwiseNchwWgradConfig& config, void* workspace,
                                 cudaStream_t stream);
void launch_depthwise_dgrad(const Conv2dBackwardParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
