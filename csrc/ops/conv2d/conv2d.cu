// Dispatch of the convolution products by element type.
#include "ops/conv2d/conv2d_gemm.cuh"

namespace warpwright {

void launch_conv2d_forward(const Conv2dParams& p, const Conv2dConfig& config, cudaStream_t stream) {
  switch (config.kind) {
    case ConvKind::k16Bit:
      return p.shape.dtype == DType::kBFloat16 ? launch_conv2d_forward_bf16(p, config, stream)
                                               : launch_conv2d_forward_fp16(p, config, stream);
    case ConvKind::kTf32:
      return launch_conv2d_forward_tf32(p, config, stream);
    case ConvKind::kFp32:
      return launch_conv2d_forward_fp32(p, config, stream);
    case ConvKind::kFp64:
      return launch_conv2d_forward_fp64(p, config, stream);
  }
}

void launch_conv2d_input_gradient(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                                  cudaStream_t stream) {
  switch (config.kind) {
    case ConvKind::k16Bit:
      return p.shape.dtype == DType::kBFloat16
                 ? launch_conv2d_input_gradient_bf16(p, config, stream)
                 : launch_conv2d_input_gradient_fp16(p, config, stream);
    case ConvKind::kTf32:
      return launch_conv2d_input_gradient_tf32(p, config, stream);
    case ConvKind::kFp32:
      return launch_conv2d_input_gradient_fp32(p, config, stream);
    case ConvKind::kFp64:
      return launch_conv2d_input_gradient_fp64(p, config, stream);
  }
}

void launch_conv2d_weight_gradient(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                                   cudaStream_t stream) {
  switch (config.kind) {
    case ConvKind::k16Bit:
      return p.shape.dtype == DType::kBFloat16
                 ? launch_conv2d_weight_gradient_bf16(p, config, stream)
                 : launch_conv2d_weight_gradient_fp16(p, config, stream);
    case ConvKind::kTf32:
      return launch_conv2d_weight_gradient_tf32(p, config, stream);
    case ConvKind::kFp32:
      return launch_conv2d_weight_gradient_fp32(p, config, stream);
    case ConvKind::kFp64:
      return launch_conv2d_weight_gradient_fp64(p, config, stream);
  }
}

}  // namespace warpwright
