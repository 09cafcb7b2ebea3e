// Launch of the depthwise kernel on tensor cores (columns_sm90.cuh), for one element type.
#pragma once

#include "common/switch.h"
#include "host/launch.h"
#include "host/tensor_map_pixels.h"
#include "ops/conv2d/cuda/depthwise/columns_sm90.cuh"

namespace warpwright {

inline CUtensorMap depthwise_columns_map(const Conv2dShape& s, const void* pointer, int64_t height,
                                         int64_t width, const DepthwiseColumnsWalk& walk,
                                         int box_cols) {
  return make_pixels_tensor_map({.dtype = s.dtype,
                                 .pointer = pointer,
                                 .batch = s.n,
                                 .size = {height, width},
                                 .channels = s.c,
                                 .box_channels = kColumnsChannels,
                                 .box_cols = box_cols,
                                 .box_images = walk.images,
                                 .swizzle = true});
}

template <class T>
void launch_depthwise_columns_fprop(const Conv2dParams& p, const DepthwiseColumnsConfig& config,
                                    cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const DepthwiseColumnsWalk& walk = config.walk;
  for_int<3, 5, 7>(config.taps, [&]<int kTaps>() {
    launch(conv2d_depthwise_columns_fprop_kernel<T, kTaps>,
           dim3(static_cast<unsigned>(walk.chunks * walk.parts)), dim3(kColumnsThreads),
           config.smem_bytes(), stream,
           depthwise_columns_map(s, p.input, s.h, s.w, walk, walk.box_cols),
           depthwise_columns_map(s, p.output, s.p, s.q, walk, walk.segments * kColumnsRun),
           static_cast<const T*>(p.input), static_cast<const T*>(p.weight),
           static_cast<const T*>(p.bias), DepthwiseImage(s), walk, config.flip);
  });
}

template <class T>
void launch_depthwise_columns_wgrad(const Conv2dBackwardParams& p,
                                    const DepthwiseColumnsConfig& config, void* workspace,
                                    cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const DepthwiseColumnsWalk& walk = config.walk;
  for_int<3, 5, 7>(config.taps, [&]<int kTaps>() {
    launch(conv2d_depthwise_columns_wgrad_kernel<T, kTaps>,
           dim3(static_cast<unsigned>(walk.chunks * walk.parts)), dim3(kColumnsThreads),
           config.smem_bytes(), stream,
           depthwise_columns_map(s, p.input, s.h, s.w, walk, walk.box_cols),
           depthwise_columns_map(s, p.grad_output, s.p, s.q, walk, walk.segments * kColumnsRun),
           static_cast<const T*>(p.input), static_cast<const T*>(p.grad_output),
           static_cast<float*>(workspace), DepthwiseImage(s), walk);
  });
}

}  // namespace warpwright
