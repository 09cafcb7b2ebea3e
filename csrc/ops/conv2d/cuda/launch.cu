// The one switch from a convolution's plan to the launchers.
#include "gemm/kinds.cuh"
#include "ops/conv2d/cuda/implicit_gemm/launch.h"
#include "ops/conv2d/cuda/sm90/launch.h"
#include "ops/conv2d/plan.h"

namespace warpwright {
namespace {

// Calls f.operator()<T>() with the element type of sm_90a convolutions.
template <class F>
void for_16bit_type(DType dtype, F&& f) {
  dtype == DType::kBFloat16 ? f.template operator()<bf16>() : f.template operator()<half>();
}

// ---- fprop ----

void run(const Conv2dParams& p, const ImplicitGemmConfig& config, cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_fprop<kKind, T>(p, config, stream);
  });
}
void run(const Conv2dParams& p, const TmaIm2colConfig& config, cudaStream_t stream) {
  for_16bit_type(p.shape.dtype, [&]<class T>() { launch_tma_im2col_fprop<T>(p, config, stream); });
}
void run(const Conv2dParams& p, const MatrixProductConfig& config, cudaStream_t stream) {
  GemmParams product = config.product;
  product.bias = p.bias;
  launch_gemm(product, config.plan, nullptr, stream);
}
void run(const Conv2dParams& p, const FewChannelsFpropConfig& config, cudaStream_t stream) {
  launch_few_channels_fprop(p, config, stream);
}
void run(const Conv2dParams& p, const DirectFpropConfig& config, cudaStream_t stream) {
  launch_direct_fprop(p, config, stream);
}
void run(const Conv2dParams& p, const DepthwiseNchwFpropConfig& config, cudaStream_t stream) {
  launch_depthwise_nchw_fprop(p, config, stream);
}

// ---- dgrad ----

// The forward that an input gradient is (is_flipped_fprop).
Conv2dParams flipped_fprop(const Conv2dBackwardParams& p) {
  return {.shape = flipped_shape(p.shape),
          .input = p.grad_output,
          .weight = p.weight,
          .bias = nullptr,
          .output = p.grad_input};
}

void run_dgrad(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config,
               cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_dgrad<kKind, T>(p, config, stream);
  });
}
void run_dgrad(const Conv2dBackwardParams& p, const TmaIm2colConfig& config, cudaStream_t stream) {
  for_16bit_type(p.shape.dtype, [&]<class T>() { launch_tma_im2col_dgrad<T>(p, config, stream); });
}
void run_dgrad(const Conv2dBackwardParams&, const MatrixProductConfig& config,
               cudaStream_t stream) {
  launch_gemm(config.product, config.plan, nullptr, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const FewChannelsDgradConfig& config,
               cudaStream_t stream) {
  launch_few_channels_dgrad(p, config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DirectFpropConfig& config,
               cudaStream_t stream) {
  launch_direct_fprop(flipped_fprop(p), config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseNchwFpropConfig& config,
               cudaStream_t stream) {
  launch_depthwise_nchw_fprop(flipped_fprop(p), config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseDgradConfig&, cudaStream_t stream) {
  launch_depthwise_dgrad(p, stream);
}

// ---- wgrad ----

void run_wgrad(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config, void* workspace,
               cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_wgrad<kKind, T>(p, config, workspace, stream);
  });
}
void run_wgrad(const Conv2dBackwardParams& p, const TmaIm2colConfig& config, void* workspace,
               cudaStream_t stream) {
  for_16bit_type(p.shape.dtype,
                 [&]<class T>() { launch_tma_im2col_wgrad<T>(p, config, workspace, stream); });
}
void run_wgrad(const Conv2dBackwardParams&, const MatrixProductConfig& config, void* workspace,
               cudaStream_t stream) {
  launch_gemm(config.product, config.plan, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const FewChannelsWgradConfig& config, void* workspace,
               cudaStream_t stream) {
  launch_few_channels_wgrad(p, config, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const DirectWgradConfig& config, void* workspace,
               cudaStream_t stream) {
  launch_direct_wgrad(p, config, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const DepthwiseNchwWgradConfig& config,
               void* workspace, cudaStream_t stream) {
  launch_depthwise_nchw_wgrad(p, config, workspace, stream);
}

}  // namespace

void launch_conv2d(const Conv2dParams& p, const Conv2dFpropPlan& plan, cudaStream_t stream) {
  std::visit([&](const auto& config) { run(p, config, stream); }, plan);
}

void launch_conv2d_backward(const Conv2dBackwardParams& p, const Conv2dBackwardPlan& plan,
                            void* workspace, cudaStream_t stream) {
  if (plan.input) {
    std::visit([&](const auto& config) { run_dgrad(p, config, stream); }, *plan.input);
  }
  if (plan.weight) {
    std::visit([&](const auto& config) { run_wgrad(p, config, workspace, stream); },
               plan.weight->kernel);
  }
  if (plan.bias) launch_bias_grad(p, plan.bias->kernel, workspace, stream);
}

}  // namespace warpwright
