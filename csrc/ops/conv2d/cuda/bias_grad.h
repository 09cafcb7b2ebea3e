// The configuration of the separate bias gradient (bias_grad.cu). NHWC: column sums of grad_output.
// NCHW: each CTA sums one channel of a run of images, and a second kernel adds the CTAs' sums by
// columns.
#pragma once

#include <algorithm>

#include "gemm/column_sum.h"
#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

// NCHW: a CTA walks one channel's planes of `part_images` images; a kernel argument.
struct BiasGradPlanes {
  int64_t pixels;  // p * q
  int64_t images;
  int parts;
  int64_t part_images;
};

struct BiasGradConfig {
  ColumnSumPlan columns;  // NHWC
  BiasGradPlanes planes;  // NCHW
  bool vectorized;        // NCHW: 16-byte accesses along the pixels
};

inline ColumnSumParams bias_grad_columns(const Conv2dShape& s, const void* grad_output,
                                         void* grad_bias) {
  return {.dtype = s.dtype,
          .rows = s.n * s.p * s.q,
          .cols = s.k,
          .matrix = grad_output,
          .stride_row = s.k,
          .stride_col = 1,
          .sum = grad_bias};
}

// float32 is summed in double (bias_grad.cu).
constexpr int64_t bias_accum_size(DType dtype) { return dtype_size(dtype) == 2 ? 4 : 8; }

inline BiasGradConfig choose_bias_grad(const Conv2dShape& s, const void* grad_output,
                                       const DeviceInfo& device) {
  BiasGradConfig config{};
  if (s.channels_last) {
    config.columns = choose_column_sum(bias_grad_columns(s, grad_output, nullptr), device,
                                       {.ctas_per_sm = 4, .accum_size = bias_accum_size(s.dtype)});
    return config;
  }
  BiasGradPlanes& planes = config.planes;
  planes.pixels = s.p * s.q;
  planes.images = s.n;
  const int64_t wanted = int64_t{device.num_sms} * 4 / std::max<int64_t>(1, s.k);
  planes.parts = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, s.n)));
  planes.part_images = ceil_div<int64_t>(std::max<int64_t>(1, s.n), planes.parts);
  config.vectorized =
      planes.pixels * dtype_size(s.dtype) % 16 == 0 && address_of(grad_output) % 16 == 0;
  return config;
}

inline int64_t workspace_bytes(const Conv2dShape& s, const BiasGradConfig& config) {
  return s.channels_last ? config.columns.workspace_bytes
                         : config.planes.parts * s.k * bias_accum_size(s.dtype);
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_bias_grad(const Conv2dBackwardParams& params, const BiasGradConfig& config,
                      void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
