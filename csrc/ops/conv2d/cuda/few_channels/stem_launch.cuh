// Launch of the kernels of an image network's first convolution (stem.h), for one element type.
#pragma once

#include "common/switch.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/conv2d/cuda/few_channels/stem_fprop_sm90.cuh"
#include "ops/conv2d/cuda/few_channels/stem_wgrad_sm90.cuh"

namespace warpwright {

// y or its gradient, in boxes of `outputs` of a row by 64 filters.
inline CUtensorMap stem_output_map(const Conv2dShape& s, const void* y, int outputs) {
  return make_rows_tensor_map({.dtype = s.dtype,
                               .pointer = y,
                               .cols = s.k,
                               .extent = {s.q, s.p, s.n},
                               .stride = {s.k, s.q * s.k, s.p * s.q * s.k},
                               .box_rows = outputs});
}

// Calls f<kSlots, kRows>() with the form of the kernels.
template <class F>
void for_stem_form(const StemConfig& config, F&& f) {
  for_int<4, 8>(config.slots(), [&]<int kSlots>() {
    config.few_rows ? f.template operator()<kSlots, kStemFewRows>()
                    : f.template operator()<kSlots, kStemMaxRows>();
  });
}

inline dim3 stem_grid(const StemConfig& config) {
  return dim3(static_cast<unsigned>(config.shape.parts * config.shape.chunks));
}

template <class T>
void launch_stem_fprop(const Conv2dParams& p, const StemConfig& config, cudaStream_t stream) {
  for_stem_form(config, [&]<int kSlots, int kRows>() {
    launch(conv2d_stem_fprop_kernel<T, kSlots, kRows>, stem_grid(config), dim3(kStemThreads),
           config.smem_bytes(), stream, static_cast<const T*>(p.input),
           static_cast<const T*>(p.weight), static_cast<const T*>(p.bias),
           stem_output_map(p.shape, p.output, 64), config.shape);
  });
}

template <class T>
void launch_stem_wgrad(const Conv2dBackwardParams& p, const StemConfig& config, void* workspace,
                       cudaStream_t stream) {
  for_stem_form(config, [&]<int kSlots, int kRows>() {
    launch(conv2d_stem_wgrad_kernel<T, kSlots, kRows>, stem_grid(config), dim3(kStemThreads),
           config.smem_bytes(), stream, static_cast<const T*>(p.input),
           stem_output_map(p.shape, p.grad_output, kStemOutputs), static_cast<float*>(workspace),
           config.shape);
  });
}

}  // namespace warpwright
