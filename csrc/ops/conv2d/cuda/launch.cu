// Dispatch of the convolution products by element type.
#include "gemm/kinds.cuh"
#include "ops/conv2d/cuda/implicit_gemm/launch.h"

namespace warpwright {

void launch_conv2d_forward(const Conv2dParams& p, const Conv2dConfig& config, cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_fprop<kKind, T>(p, config, stream);
  });
}

void launch_conv2d_input_gradient(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                                  cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_dgrad<kKind, T>(p, config, stream);
  });
}

void launch_conv2d_weight_gradient(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                                   cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_wgrad<kKind, T>(p, config, stream);
  });
}

}  // namespace warpwright
