// The configuration of the direct forward (fprop.cu). It also computes the input gradient of a
// depthwise convolution with stride 1 and multiplier 1, as the forward of the flipped window.
#pragma once

#include <string>

#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

// How CTAs walk the outputs; a kernel argument.
struct DirectFpropWalk {
  int groups;      // of kRunK neighbouring channels in a CTA: 1, 2, 4 or 8
  int chunks;      // CTAs that share a pixel
  int slots;       // runs of pixels that a CTA processes together
  int part_units;  // units per CTA
  bool vec_y, flip;
};

struct DirectFpropConfig {
  bool depthwise;
  bool vectorized_x;          // depthwise and NHWC: x in vectors of channels
  int row_taps;               // taps of a window's row known at compile time: 3 or 7; 0: any window
  bool weights_in_registers;  // one channel, 3 x 3
  int64_t products;           // per output
  DirectFpropWalk walk;
  int64_t blocks;

  bool is_large() const { return depthwise || weights_in_registers; }  // in registers
};

// Threads per CTA and CTAs per SM, by whether the kernel needs many registers.
constexpr int direct_fprop_threads(bool is_large) { return is_large ? 128 : 256; }
constexpr int direct_fprop_ctas(bool is_large, bool is_double) {
  return is_large ? (is_double ? 2 : 3) : (is_double ? 1 : 2);
}

// `flip`: tap (r, s) of the weight is read at (R-1-r, S-1-s).
inline DirectFpropConfig choose_direct_fprop(const Conv2dShape& s, bool depthwise, bool flip,
                                             const Conv2dAddresses& addresses,
                                             const DeviceInfo& device) {
  const bool is_double = s.dtype == DType::kFloat64;
  DirectFpropConfig config{};
  config.depthwise = depthwise;
  config.products = s.group_c() * s.taps();
  DirectFpropWalk& walk = config.walk;
  walk.flip = flip;
  const int run = static_cast<int>(std::min<int64_t>(kRunK, 16 / dtype_size(s.dtype)));
  walk.vec_y = s.channels_last ? runs_are_vectors(s.dtype, s.k, run,
                                                  addresses.y | (depthwise ? addresses.x : 0))
                               : runs_are_vectors(s.dtype, s.q, kRunQ, addresses.y);
  config.vectorized_x =
      depthwise && s.channels_last && s.group_k() == 1 && walk.vec_y && s.h * s.w > 0;
  const bool three = s.dilation_w == 1 && s.s == 3 && s.stride_w == 1;
  const bool seven = s.dilation_w == 1 && s.s == 7 && s.stride_w == 2 && !is_double && !depthwise;
  config.weights_in_registers = three && !depthwise && s.r == 3 && s.group_c() == 1 && !is_double;
  config.row_taps = three && (!depthwise || config.vectorized_x) ? 3 : seven ? 7 : 0;

  const int threads = direct_fprop_threads(config.is_large());
  // The largest chunk with the fewest idle groups. NCHW needs one warp per group.
  const int groups = static_cast<int>(ceil_div<int64_t>(s.k, kRunK));
  walk.groups = s.channels_last ? 8 : threads / 32;
  for (int candidate : {4, 2, 1}) {
    if (ceil_div(groups, candidate) * candidate < ceil_div(groups, walk.groups) * walk.groups) {
      walk.groups = candidate;
    }
  }
  walk.chunks = ceil_div(groups, walk.groups);
  walk.slots = threads / walk.groups;
  // As many CTAs as stay resident. More chunks than that get CTAs of their own.
  const int units = direct_units(s);
  const int ctas = device.num_sms * direct_fprop_ctas(config.is_large(), is_double);
  const int parts =
      std::clamp(ctas / std::max(1, walk.chunks), 1, std::max(1, ceil_div(units, walk.slots)));
  walk.part_units = ceil_div(ceil_div(units, parts), walk.slots) * walk.slots;
  config.blocks = int64_t{ceil_div(units, std::max(1, walk.part_units))} * walk.chunks;
  return config;
}

inline std::string describe(const DirectFpropConfig& config) {
  if (config.depthwise) {
    return std::string("portable depthwise kernel, FMA") +
           (config.walk.flip ? ", flipped window" : "") + ": one input channel per output";
  }
  return "portable few-channel kernel, FMA: " + std::to_string(config.products) +
         " products per output, nothing is unfolded";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_direct_fprop(const Conv2dParams& params, const DirectFpropConfig& config,
                         cudaStream_t stream);
#endif

}  // namespace warpwright
