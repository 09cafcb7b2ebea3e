// Which kernel computes a direction of a convolution on the GPU, and how. A plan holds the
// configuration of one of the existing kernels. The addresses decide which accesses are vectors.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "ops/conv2d/cuda/bias_grad.h"
#include "ops/conv2d/cuda/depthwise/depthwise.h"
#include "ops/conv2d/cuda/direct/fprop.h"
#include "ops/conv2d/cuda/direct/wgrad.h"
#include "ops/conv2d/cuda/few_channels/dgrad.h"
#include "ops/conv2d/cuda/few_channels/fprop.h"
#include "ops/conv2d/cuda/few_channels/wgrad.h"
#include "ops/conv2d/cuda/implicit_gemm/config.h"
#include "ops/conv2d/cuda/matrix_product.h"
#include "ops/conv2d/cuda/sm90/config.h"

namespace warpwright {

using Conv2dFpropPlan =
    std::variant<ImplicitGemmConfig, TmaIm2colConfig, MatrixProductConfig, FewChannelsFpropConfig,
                 DirectFpropConfig, DepthwiseNchwFpropConfig>;

// Depthwise with stride 1 and multiplier 1: the fprop configurations of the flipped window.
using Conv2dDgradPlan =
    std::variant<ImplicitGemmConfig, TmaIm2colConfig, MatrixProductConfig, FewChannelsDgradConfig,
                 DirectFpropConfig, DepthwiseNchwFpropConfig, DepthwiseDgradConfig>;

struct Conv2dWgradPlan {
  std::variant<ImplicitGemmConfig, TmaIm2colConfig, MatrixProductConfig, FewChannelsWgradConfig,
               DirectWgradConfig, DepthwiseNchwWgradConfig>
      kernel;
  int64_t workspace_bytes;

  // All kernels except the implicit GEMM also sum the bias gradient, the matrix product in most
  // cases.
  bool sums_bias() const {
    if (const auto* product = std::get_if<MatrixProductConfig>(&kernel))
      return product->plan.sums_rows;
    if (const auto* windows = std::get_if<TmaIm2colConfig>(&kernel)) return windows->sums_bias;
    return !std::holds_alternative<ImplicitGemmConfig>(kernel);
  }
};

struct Conv2dBiasGradPlan {
  BiasGradConfig kernel;
  int64_t workspace_bytes;
};

// ---- choice ----

// Depthwise: 3 x 3 windows in NCHW have kernels of their own.
template <class Plan>
Plan choose_depthwise_fprop(const Conv2dShape& s, bool flip, const Conv2dAddresses& addresses,
                            const DeviceInfo& device) {
  if (takes_depthwise_nchw_fprop(s)) return choose_depthwise_nchw_fprop(s, flip, addresses);
  return choose_direct_fprop(s, /*depthwise=*/true, flip, addresses, device);
}

// A product of windows that no special kernel takes: sm_90a, or portable with the reason why.
// `sums`: wgrad's bias gradient, null if it is not wanted.
inline std::variant<ImplicitGemmConfig, TmaIm2colConfig> choose_window_product(
    ConvDirection direction, const Conv2dShape& s, const Conv2dAddresses& addresses,
    const void* sums, const DeviceInfo& device) {
  ImplicitGemmConfig portable = choose_implicit_gemm(direction, s, addresses, device);
  const char* why_not = why_not_tma_im2col(direction, s, addresses);
  if (why_not == nullptr) {
    const double cycles = estimate_implicit_gemm(direction, s, portable, device);
    const auto config = choose_tma_im2col(direction, s, addresses, sums, cycles, device);
    if (config) return *config;
  } else if (s.sm90 && portable.vectorized && dtype_size(s.dtype) == 2) {
    portable.reason = why_not;
  }
  return portable;
}

// A single input channel is both few channels and depthwise. The few-channel kernels load an input
// once for a run of outputs.
inline Conv2dFpropPlan choose_conv2d_fprop(const Conv2dShape& s, const Conv2dAddresses& addresses,
                                           const DeviceInfo& device) {
  if (conv2d_few_channels_supported(s)) {
    if (const auto config = choose_few_channels_fprop(s, addresses, device)) return *config;
    return choose_direct_fprop(s, /*depthwise=*/false, /*flip=*/false, addresses, device);
  }
  if (conv2d_depthwise_supported(s)) {
    return choose_depthwise_fprop<Conv2dFpropPlan>(s, /*flip=*/false, addresses, device);
  }
  const auto product = choose_matrix_product(ConvDirection::kFprop, s, addresses, nullptr, device);
  if (product) return *product;
  return std::visit([](const auto& config) { return Conv2dFpropPlan(config); },
                    choose_window_product(ConvDirection::kFprop, s, addresses, nullptr, device));
}

inline Conv2dDgradPlan choose_conv2d_dgrad(const Conv2dShape& s, const Conv2dAddresses& addresses,
                                           const DeviceInfo& device) {
  if (const auto config = choose_few_channels_dgrad(s, addresses, device)) return *config;
  if (conv2d_depthwise_supported(s)) {
    if (!is_flipped_fprop(s)) return DepthwiseDgradConfig{};
    return choose_depthwise_fprop<Conv2dDgradPlan>(flipped_shape(s), /*flip=*/true,
                                                   {addresses.y, addresses.w, addresses.x}, device);
  }
  const auto product = choose_matrix_product(ConvDirection::kDgrad, s, addresses, nullptr, device);
  if (product) return *product;
  return std::visit([](const auto& config) { return Conv2dDgradPlan(config); },
                    choose_window_product(ConvDirection::kDgrad, s, addresses, nullptr, device));
}

// grad_bias: null if it is not wanted.
inline Conv2dWgradPlan choose_conv2d_wgrad(const Conv2dShape& s, const Conv2dAddresses& addresses,
                                           void* grad_bias, const DeviceInfo& device) {
  auto plan = [&](const auto& config) {
    return Conv2dWgradPlan{config, workspace_bytes(s, config)};
  };
  if (const auto config = choose_few_channels_wgrad(s, addresses, device)) return plan(*config);
  if (conv2d_few_channels_wgrad_supported(s)) {
    return plan(choose_direct_wgrad(s, /*depthwise=*/false, addresses, device));
  }
  if (conv2d_depthwise_supported(s)) {
    if (is_depthwise_nchw_3x3(s)) return plan(choose_depthwise_nchw_wgrad(s, addresses, device));
    return plan(choose_direct_wgrad(s, /*depthwise=*/true, addresses, device));
  }
  const auto product =
      choose_matrix_product(ConvDirection::kWgrad, s, addresses, grad_bias, device);
  if (product) return plan(*product);
  return std::visit(plan,
                    choose_window_product(ConvDirection::kWgrad, s, addresses, grad_bias, device));
}

inline Conv2dBiasGradPlan choose_conv2d_bias_grad(const Conv2dShape& s, const void* grad_output,
                                                  const DeviceInfo& device) {
  const BiasGradConfig config = choose_bias_grad(s, grad_output, device);
  return {config, workspace_bytes(s, config)};
}

// ---- a call ----

inline Conv2dFpropPlan choose_conv2d(const Conv2dParams& p, const DeviceInfo& device) {
  return choose_conv2d_fprop(
      p.shape, {address_of(p.input), address_of(p.weight), address_of(p.output)}, device);
}

struct Conv2dBackwardPlan {
  std::optional<Conv2dDgradPlan> input;    // none: not wanted
  std::optional<Conv2dWgradPlan> weight;   // the same
  std::optional<Conv2dBiasGradPlan> bias;  // none: not wanted, or summed by the weight's kernel

  // The kernels run one after the other and share the workspace.
  int64_t workspace_bytes() const {
    return std::max(weight ? weight->workspace_bytes : 0, bias ? bias->workspace_bytes : 0);
  }
};

inline Conv2dBackwardPlan choose_conv2d_backward(const Conv2dBackwardParams& p,
                                                 const DeviceInfo& device) {
  const uintptr_t dy = address_of(p.grad_output);
  Conv2dBackwardPlan plan;
  if (p.grad_input != nullptr) {
    plan.input =
        choose_conv2d_dgrad(p.shape, {address_of(p.grad_input), address_of(p.weight), dy}, device);
  }
  if (p.grad_weight != nullptr) {
    plan.weight = choose_conv2d_wgrad(p.shape, {address_of(p.input), address_of(p.grad_weight), dy},
                                      p.grad_bias, device);
  }
  if (p.grad_bias != nullptr && !(plan.weight && plan.weight->sums_bias())) {
    plan.bias = choose_conv2d_bias_grad(p.shape, p.grad_output, device);
  }
  return plan;
}

template <class... Kernels>
std::string describe(const std::variant<Kernels...>& plan) {
  return std::visit([](const auto& config) { return describe(config); }, plan);
}
inline std::string describe(const Conv2dWgradPlan& plan) { return describe(plan.kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
void launch_conv2d(const Conv2dParams& params, const Conv2dFpropPlan& plan, cudaStream_t stream);
// A workspace is 16-byte aligned, or null if the plan needs none.
void launch_conv2d_backward(const Conv2dBackwardParams& params, const Conv2dBackwardPlan& plan,
                            void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
