// Launches of the kernels that walk rows (rows_sm90.cuh), for one element type.
#pragma once

#include "common/switch.h"
#include "host/launch.h"
#include "host/tensor_map_pixels.h"
#include "ops/conv2d/cuda/depthwise/rows_sm90.cuh"

namespace warpwright {

inline CUtensorMap depthwise_rows_map(const Conv2dShape& s, const void* pointer, int64_t height,
                                      int64_t width, const DepthwiseRowsWalk& walk, int box_cols) {
  return make_pixels_tensor_map({.dtype = s.dtype,
                                 .pointer = pointer,
                                 .batch = s.n,
                                 .size = {height, width},
                                 .channels = s.c,
                                 .box_channels = walk.box_channels,
                                 .box_cols = box_cols,
                                 .box_images = walk.images,
                                 .swizzle = false});
}

inline DepthwiseRowsShape depthwise_rows_shape(const Conv2dShape& s, int64_t rows, int64_t cols) {
  return {static_cast<int>(s.n),  static_cast<int>(s.c),     static_cast<int>(rows),
          static_cast<int>(cols), static_cast<int>(s.pad_h), static_cast<int>(s.pad_w)};
}

inline dim3 depthwise_rows_grid(const DepthwiseRowsConfig& config) {
  return dim3(static_cast<unsigned>(config.walk.chunks * config.walk.parts));
}

template <class T>
void launch_depthwise_rows_fprop(const Conv2dParams& p, const DepthwiseRowsConfig& config,
                                 cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const CUtensorMap map =
      depthwise_rows_map(s, p.input, s.h, s.w, config.walk, config.walk.box_cols);
  for_int<3, 5, 7>(config.taps, [&]<int kTaps>() {
    for_int<1, 2>(config.stride, [&]<int kStride>() {
      launch(conv2d_depthwise_rows_fprop_kernel<T, kTaps, kStride>, depthwise_rows_grid(config),
             dim3(static_cast<unsigned>(config.threads())), config.smem_bytes(sizeof(T)), stream,
             map, static_cast<const T*>(p.weight), static_cast<const T*>(p.bias),
             static_cast<T*>(p.output), depthwise_rows_shape(s, s.p, s.q), config.walk,
             config.flip);
    });
  });
}

template <class T>
void launch_depthwise_rows_dgrad(const Conv2dBackwardParams& p, const DepthwiseRowsConfig& config,
                                 cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const CUtensorMap map =
      depthwise_rows_map(s, p.grad_output, s.p, s.q, config.walk, config.walk.box_cols);
  const int pairs = static_cast<int>(depthwise_rows_extent(ConvDirection::kDgrad, s).rows);
  for_int<3, 5, 7>(config.taps, [&]<int kTaps>() {
    launch(conv2d_depthwise_rows_dgrad_kernel<T, kTaps>, depthwise_rows_grid(config),
           dim3(static_cast<unsigned>(config.threads())), config.smem_bytes(sizeof(T)), stream, map,
           static_cast<const T*>(p.weight), static_cast<T*>(p.grad_input),
           depthwise_rows_shape(s, s.h, s.w), config.walk, pairs);
  });
}

template <class T>
void launch_depthwise_rows_wgrad(const Conv2dBackwardParams& p, const DepthwiseRowsConfig& config,
                                 void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const DepthwiseRowsWalk& walk = config.walk;
  const CUtensorMap x_map = depthwise_rows_map(s, p.input, s.h, s.w, walk, walk.box_cols);
  const CUtensorMap dy_map =
      depthwise_rows_map(s, p.grad_output, s.p, s.q, walk, walk.strips * kRowsRun);
  for_int<3, 5, 7>(config.taps, [&]<int kTaps>() {
    for_int<1, 2>(config.stride, [&]<int kStride>() {
      launch(conv2d_depthwise_rows_wgrad_kernel<T, kTaps, kStride>, depthwise_rows_grid(config),
             dim3(static_cast<unsigned>(config.threads())), config.smem_bytes(sizeof(T)), stream,
             x_map, dy_map, static_cast<const T*>(p.input), static_cast<const T*>(p.grad_output),
             static_cast<float*>(workspace), DepthwiseImage(s), walk);
    });
  });
}

}  // namespace warpwright
