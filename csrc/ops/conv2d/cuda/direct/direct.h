// Direct convolutions, for the shapes that are bound by memory and not by FLOPs: few input channels
// (group_c * R * S products an output) and depthwise (group_c == 1). Every tensor is read or
// written where it lies; nothing is unfolded. Weight gradients are two launches: partial sums of
// runs of pixels into `workspace`, then their sum in a fixed order.
#pragma once

#include "ops/conv2d/conv2d.h"

namespace warpwright {

constexpr int64_t kFewChannelsMaxTaps =
    160;  // the weights of 64 outputs fit 48 KB of shared memory

// The kernels count runs of outputs in 32 bits; what has more is for the implicit GEMM.
inline bool conv2d_direct_fits(const Conv2dShape& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  // A tile reaches up to kOver outputs past the last one.
  constexpr int64_t kOver = 64;
  const int64_t down = (g.p + kOver) * g.stride_h + g.r * g.dilation_h + g.pad_h;
  const int64_t across = (g.q + kOver) * g.stride_w + g.s * g.dilation_w + g.pad_w;
  for (int64_t extent : {g.c, g.h, g.w, g.k, g.p, g.q, g.n, down, across}) {
    if (extent >= kLimit) return false;
  }
  const int64_t rows = std::max(g.p, g.h), runs = (std::max(g.q, g.w) + 3) / 4;
  return static_cast<double>(g.n) * static_cast<double>(rows) * static_cast<double>(runs) <
         static_cast<double>(kLimit);
}

// Few input channels, one group: forward and weight (+ bias) gradient.
inline bool conv2d_few_channels_supported(const Conv2dShape& g) {
  return g.groups == 1 && g.c <= 4 && g.c * g.taps() <= kFewChannelsMaxTaps &&
         conv2d_direct_fits(g);
}

// What a CTA of the tensor-core kernels has at once: rows of whole runs of 16 output pixels, about
// 256 pixels in tiles of even height.
struct PixelTiles {
  int64_t rows, runs;        // of a tile
  int64_t count_p, count_q;  // tiles of an image
  int64_t input_rows;        // that a tile sees

  explicit PixelTiles(const Conv2dShape& s) {
    constexpr int64_t kPixels = 256;
    const int64_t all_runs = ceil_div(s.q, 16);
    runs = all_runs <= 2 ? all_runs : 1;
    rows = ceil_div(s.p, ceil_div(s.p * runs * 16, kPixels));
    count_p = ceil_div(s.p, rows);
    count_q = ceil_div(all_runs, runs);
    input_rows = (rows - 1) * s.stride_h + (s.r - 1) * s.dilation_h + 1;
  }

  int64_t input_cols(const Conv2dShape& s) const {
    return (runs * 16 - 1) * s.stride_w + (s.s - 1) * s.dilation_w + 1;
  }
};

// The FMA weight gradient re-reads grad_output for every few taps: beyond one 5 x 5 window the
// implicit GEMM's tensor cores are ahead (7 x 7 and 3 channels: by far).
inline bool conv2d_few_channels_wgrad_supported(const Conv2dShape& g) {
  constexpr int64_t kMaxTaps = 32;
  return conv2d_few_channels_supported(g) && g.c * g.taps() <= kMaxTaps;
}

// Depthwise with any multiplier k / c: all three directions.
inline bool conv2d_depthwise_supported(const Conv2dShape& g) {
  return g.groups > 1 && g.groups == g.c && g.taps() <= kFewChannelsMaxTaps &&
         conv2d_direct_fits(g);
}

int64_t conv2d_few_channels_wgrad_workspace_bytes(const Conv2dShape& shape,
                                                  const DeviceInfo& device);
int64_t conv2d_depthwise_wgrad_workspace_bytes(const Conv2dShape& shape, const DeviceInfo& device);
int64_t conv2d_bias_grad_workspace_bytes(const Conv2dShape& shape, const DeviceInfo& device);

#ifdef WARPWRIGHT_WITH_CUDA
// A `workspace` is 16-byte aligned and as long as ..._workspace_bytes(shape,
// current_device_info()); the parameters' own workspace pointer is not looked at.
void launch_conv2d_few_channels_fwd(const Conv2dParams& params, cudaStream_t stream);
// Writes grad_weight and, if it is not null, grad_bias.
void launch_conv2d_few_channels_wgrad(const Conv2dBackwardParams& params, void* workspace,
                                      cudaStream_t stream);

void launch_conv2d_depthwise_fwd(const Conv2dParams& params, cudaStream_t stream);
void launch_conv2d_depthwise_dgrad(const Conv2dBackwardParams& params, cudaStream_t stream);
// Writes grad_weight and, if it is not null, grad_bias.
void launch_conv2d_depthwise_wgrad(const Conv2dBackwardParams& params, void* workspace,
                                   cudaStream_t stream);

// Sums of grad_output over n, p, q into grad_bias.
void launch_conv2d_bias_grad(const Conv2dBackwardParams& params, void* workspace,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
