// Launch of the walks, for one element type.
#pragma once

#include "host/launch.h"
#include "ops/conv2d/cuda/row_walk/launch.h"
#include "ops/conv2d/cuda/row_walk/row_walk_sm90.cuh"
#include "ops/conv2d/cuda/row_walk/wgrad_sm90.cuh"
#include "ops/conv2d/cuda/sm90/launch.cuh"

namespace warpwright {

// A dense NHWC image in boxes of `columns` pixels of one row by 128 bytes of channels.
inline CUtensorMap row_map(DType dtype, const void* pixels, int64_t images, int64_t height,
                           int64_t width, int64_t channels, int columns) {
  return make_rows_tensor_map({.dtype = dtype,
                               .pointer = pixels,
                               .cols = channels,
                               .extent = {width, height, images},
                               .stride = {channels, width * channels, height * width * channels},
                               .box_rows = columns});
}

// `pixels` is the NHWC image of windows: x, or dy for dgrad.
template <class T, int kColumns, bool kMnMajor, bool kMoments = false>
void launch_walk_kernel(const Conv2dShape& s, const RowWalkConfig& config, const void* pixels,
                        const void* weight, const WalkOutput& output, cudaStream_t stream) {
  const WindowAxes axes = walk_axes(config.direction, s);
  const bool dgrad = config.direction == ConvDirection::kDgrad;
  const CUtensorMap image = row_map(s.dtype, pixels, s.n, axes[0].size, axes[1].size,
                                    dgrad ? s.k : s.c, config.shape.box_columns());
  const bool transposed = dgrad && !kMnMajor;
  const CUtensorMap weights =
      weight_map(s, weight, kMnMajor ? static_cast<int>(kConvChunk) : kColumns, transposed);
  launch(conv2d_row_walk_kernel<T, kColumns, kMnMajor, kMoments>, dim3(config.ctas),
         dim3(kWalkThreads), config.smem_bytes(), stream, image, weights, output, config.shape,
         dgrad);
}

template <class T>
void launch_row_walk(const Conv2dShape& s, const RowWalkConfig& config, const void* pixels,
                     const void* weight, const void* bias, void* d, cudaStream_t stream) {
  const WalkOutput output{.d = d, .bias = bias};
  if constexpr (sizeof(T) == 4) {
    config.columns == 32
        ? launch_walk_kernel<T, 32, false>(s, config, pixels, weight, output, stream)
        : launch_walk_kernel<T, 64, false>(s, config, pixels, weight, output, stream);
  } else {
    config.columns == 32
        ? launch_walk_kernel<T, 32, false>(s, config, pixels, weight, output, stream)
    : config.direction == ConvDirection::kFprop
        ? launch_walk_kernel<T, 64, false>(s, config, pixels, weight, output, stream)
        : launch_walk_kernel<T, 64, true>(s, config, pixels, weight, output, stream);
  }
}

template <class T>
void launch_row_walk_wgrad(const Conv2dBackwardParams& p, const RowWalkWgradConfig& config,
                           void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const WalkGradShape& w = config.shape;
  const CUtensorMap x = row_map(s.dtype, p.input, s.n, s.h, s.w, s.c, w.part_columns);
  const CUtensorMap dy = row_map(s.dtype, p.grad_output, s.n, s.p, s.q, s.k, w.part_columns);
  using Memory = WalkGrad<T>;
  launch(conv2d_row_walk_wgrad_kernel<T>,
         dim3(static_cast<unsigned>(w.ctas_per_group * w.groups())), dim3(Memory::kThreads),
         Memory::kSmemBytes, stream, x, dy, static_cast<float*>(workspace), w);
}

template <class T>
void launch_row_walk_moments(const Conv2dParams& p, const RowWalkConfig& config,
                             const MomentsRecords& moments, cudaStream_t stream) {
  const WalkOutput output{.d = p.output, .bias = p.bias, .moments = moments};
  config.columns == 32
      ? launch_walk_kernel<T, 32, false, true>(p.shape, config, p.input, p.weight, output, stream)
      : launch_walk_kernel<T, 64, false, true>(p.shape, config, p.input, p.weight, output, stream);
}

}  // namespace warpwright
