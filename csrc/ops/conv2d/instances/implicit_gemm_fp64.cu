// The convolution products of float64; a file of its own so that the types compile in
// parallel.
#include "ops/conv2d/conv2d_gemm.cuh"

namespace warpwright {

void launch_conv2d_forward_fp64(const Conv2dParams& p, const Conv2dConfig& config,
                                cudaStream_t stream) {
  launch_forward_of<ConvKind::kFp64, double>(p, config, stream);
}

void launch_conv2d_input_gradient_fp64(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                                       cudaStream_t stream) {
  launch_input_gradient_of<ConvKind::kFp64, double>(p, config, stream);
}

void launch_conv2d_weight_gradient_fp64(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                                        cudaStream_t stream) {
  launch_weight_gradient_of<ConvKind::kFp64, double>(p, config, stream);
}

}  // namespace warpwright
