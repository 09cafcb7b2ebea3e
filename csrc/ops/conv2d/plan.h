// Which kernel computes a direction of a convolution on the GPU, and how. A plan holds the
// configuration of one of the existing kernels. The addresses decide which accesses are vectors.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "ops/conv2d/cuda/bias_grad.h"
#include "ops/conv2d/cuda/depthwise/columns.h"
#include "ops/conv2d/cuda/depthwise/depthwise.h"
#include "ops/conv2d/cuda/depthwise/rows.h"
#include "ops/conv2d/cuda/direct/fprop.h"
#include "ops/conv2d/cuda/direct/wgrad.h"
#include "ops/conv2d/cuda/few_channels/dgrad.h"
#include "ops/conv2d/cuda/few_channels/fprop.h"
#include "ops/conv2d/cuda/few_channels/stem.h"
#include "ops/conv2d/cuda/few_channels/wgrad.h"
#include "ops/conv2d/cuda/implicit_gemm/config.h"
#include "ops/conv2d/cuda/layout/copies.h"
#include "ops/conv2d/cuda/matrix_product.h"
#include "ops/conv2d/cuda/row_walk/row_walk.h"
#include "ops/conv2d/cuda/row_walk/wgrad.h"
#include "ops/conv2d/cuda/sm90/config.h"
#include "ops/conv2d/cuda/sm90/join.h"
#include "ops/conv2d/cuda/sm90/plane_product.h"

namespace warpwright {

// A direction's kernel, and the tensors in rows of channels that it needs if the call's are NCHW.
// `copies` are at the start of the workspace, the kernel's own workspace follows.
template <class... Kernels>
struct ConvPlan {
  std::variant<Kernels...> kernel;
  LayoutCopies copies;
  int64_t workspace_bytes;
  const char* why_portable = nullptr;  // why no sm_90a kernel runs; null: explain() is silent

  template <class Config>
  explicit(false)
      ConvPlan(const Config& config, const LayoutCopies& copies = {}, int64_t kernel_bytes = 0)
      : kernel(config), copies(copies), workspace_bytes(copies.bytes + kernel_bytes) {}
};

using Conv2dFpropPlan =
    ConvPlan<ImplicitGemmConfig, TmaIm2colConfig, RowWalkConfig, MatrixProductConfig,
             PlaneProductConfig, StemConfig, FewChannelsFpropConfig, DirectFpropConfig,
             DepthwiseNchwFpropConfig, DepthwiseRowsConfig, DepthwiseColumnsConfig>;

// Depthwise with stride 1 and multiplier 1: the fprop configurations of the flipped window.
using Conv2dDgradPlan =
    ConvPlan<ImplicitGemmConfig, TmaIm2colConfig, RowWalkConfig, MatrixProductConfig,
             PlaneProductConfig, FewChannelsDgradConfig, DirectFpropConfig,
             DepthwiseNchwFpropConfig, DepthwiseNchwDgradConfig, DepthwiseDgradConfig,
             DepthwiseRowsConfig, DepthwiseColumnsConfig, JoinedDgradConfig>;

using Conv2dWgradPlan =
    ConvPlan<ImplicitGemmConfig, TmaIm2colConfig, RowWalkWgradConfig, MatrixProductConfig,
             PlaneProductConfig, StemConfig, FewChannelsWgradConfig, DirectWgradConfig,
             DepthwiseNchwWgradConfig, DepthwiseRowsConfig, DepthwiseColumnsConfig>;

// All kernels except the implicit GEMM, the walks and the product of planes also sum the bias
// gradient, the matrix product in most cases.
inline bool sums_bias(const Conv2dWgradPlan& plan) {
  if (const auto* product = std::get_if<MatrixProductConfig>(&plan.kernel)) {
    return product->plan.sums_rows;
  }
  if (const auto* windows = std::get_if<TmaIm2colConfig>(&plan.kernel)) return windows->sums_bias;
  return !std::holds_alternative<ImplicitGemmConfig>(plan.kernel) &&
         !std::holds_alternative<RowWalkWgradConfig>(plan.kernel) &&
         !std::holds_alternative<PlaneProductConfig>(plan.kernel);
}

struct Conv2dBiasGradPlan {
  BiasGradConfig kernel;
  int64_t workspace_bytes;
};

// ---- choice ----

// The sm_90a kernel of a depthwise convolution in rows of channels, or the reason why there is
// none. dgrad of stride 1 is an fprop of the flipped window.
template <class Plan>
Plan choose_depthwise_in_rows(ConvDirection direction, const Conv2dShape& call,
                              const Conv2dAddresses& addresses, const DeviceInfo& device,
                              const LayoutCopies& copies, Plan portable) {
  Conv2dShape s = copies.shape(call);
  if (!s.sm90 || !s.channels_last) return portable;
  const bool flip = direction == ConvDirection::kDgrad && is_flipped_fprop(s);
  if (flip) s = flipped_shape(s), direction = ConvDirection::kFprop;
  portable.why_portable = why_not_depthwise_rows(s, copies.addresses(addresses));
  if (portable.why_portable != nullptr) return portable;
  const char* why_rows = why_depthwise_rows(direction, s);
  if (why_rows == nullptr) {
    const auto config =
        choose_depthwise_columns(s, direction == ConvDirection::kWgrad, flip, device);
    return {config, copies, workspace_bytes(s, config)};
  }
  auto config = choose_depthwise_rows(direction, s, flip, device);
  config.reason = why_rows;
  return {config, copies, workspace_bytes(s, config)};
}

// Depthwise: square windows in NCHW have kernels of their own.
inline Conv2dFpropPlan choose_depthwise_fprop(const Conv2dShape& s,
                                              const Conv2dAddresses& addresses,
                                              const DeviceInfo& device) {
  if (takes_depthwise_nchw_fprop(s)) {
    return choose_depthwise_nchw_fprop(s, /*flip=*/false, addresses);
  }
  constexpr ConvDirection kDirection = ConvDirection::kFprop;
  const auto copies = choose_depthwise_copies(kDirection, s).value_or(LayoutCopies{});
  const Conv2dFpropPlan portable = {
      choose_direct_fprop(copies.shape(s), /*depthwise=*/true, /*flip=*/false,
                          copies.addresses(addresses), device),
      copies};
  return choose_depthwise_in_rows(kDirection, s, addresses, device, copies, portable);
}

inline Conv2dDgradPlan choose_depthwise_dgrad(const Conv2dShape& s,
                                              const Conv2dAddresses& addresses,
                                              const DeviceInfo& device) {
  constexpr ConvDirection kDirection = ConvDirection::kDgrad;
  const Conv2dShape flipped = flipped_shape(s);
  if (is_flipped_fprop(s) && takes_depthwise_nchw_fprop(flipped)) {
    return choose_depthwise_nchw_fprop(flipped, /*flip=*/true,
                                       {addresses.y, addresses.w, addresses.x});
  }
  if (const auto config = choose_depthwise_nchw_dgrad(s)) return *config;
  const auto copies = choose_depthwise_copies(kDirection, s).value_or(LayoutCopies{});
  Conv2dDgradPlan portable = {DepthwiseDgradConfig{}, copies};
  if (is_flipped_fprop(s)) {
    const Conv2dAddresses at = copies.addresses(addresses);
    portable = {choose_direct_fprop(copies.shape(flipped), /*depthwise=*/true, /*flip=*/true,
                                    {at.y, at.w, at.x}, device),
                copies};
  }
  return choose_depthwise_in_rows(kDirection, s, addresses, device, copies, portable);
}

inline Conv2dWgradPlan choose_depthwise_wgrad(const Conv2dShape& s,
                                              const Conv2dAddresses& addresses,
                                              const DeviceInfo& device) {
  if (is_depthwise_nchw(s)) {
    const auto config = choose_depthwise_nchw_wgrad(s, addresses, device);
    return {config, {}, workspace_bytes(s, config)};
  }
  constexpr ConvDirection kDirection = ConvDirection::kWgrad;
  const auto copies = choose_depthwise_copies(kDirection, s).value_or(LayoutCopies{});
  const Conv2dShape shape = copies.shape(s);
  const auto config =
      choose_direct_wgrad(shape, /*depthwise=*/true, copies.addresses(addresses), device);
  const Conv2dWgradPlan portable = {config, copies, workspace_bytes(shape, config)};
  return choose_depthwise_in_rows(kDirection, s, addresses, device, copies, portable);
}

// A product of windows that no special kernel takes: sm_90a, or portable with the reason why.
// `sums`: wgrad's bias gradient, null if it is not wanted.
template <class Plan>
Plan choose_window_product(ConvDirection direction, const Conv2dShape& s,
                           const Conv2dAddresses& addresses, void* sums, const DeviceInfo& device) {
  ImplicitGemmConfig portable = choose_implicit_gemm(direction, s, addresses, device);
  auto plan = [&](const auto& config, const LayoutCopies& copies = {}) {
    return Plan(config, copies, workspace_bytes(copies.shape(s), config));
  };
  auto plan_of_product = [&](const RowsProduct& product) {
    return std::visit([&](const auto& config) { return plan(config, product.copies); },
                      product.kernel);
  };
  if (const auto patches = choose_patch_product(direction, s, addresses, sums, device)) {
    return plan_of_product(*patches);
  }
  LayoutCopies copies;
  if (transposes_w(direction, s)) copies.transpose_w(s);
  if (!s.channels_last) {
    if (const auto planes = choose_plane_product(direction, s, addresses, device)) {
      return plan(*planes, copies);
    }
    const auto rows = choose_rows_product(direction, s, addresses, sums, device);
    return rows ? plan_of_product(*rows) : plan(portable);
  }
  const Conv2dAddresses at = copies.addresses(addresses);
  const char* why_not = why_not_tma_im2col(direction, s, at);
  double cycles = estimate_implicit_gemm(direction, s, portable, device);
  std::optional<TmaIm2colConfig> windows;
  if (why_not == nullptr) windows = choose_tma_im2col(direction, s, at, sums, cycles, device);
  if (windows) cycles = estimate_tma_im2col(s, *windows, device);
  if constexpr (std::is_same_v<Plan, Conv2dWgradPlan>) {
    if (const auto walk = choose_row_walk_wgrad(s, at, sums, cycles, device)) return plan(*walk);
  } else if (const auto walk = choose_row_walk(direction, s, at, cycles, device)) {
    return plan(*walk, copies);
  }
  if (windows) return plan(*windows, copies);
  if (why_not != nullptr && s.sm90 && portable.vectorized && has_tma_im2col_type(s)) {
    portable.reason = why_not;
  }
  return plan(portable);
}

// A single input channel is both few channels and depthwise. The few-channel kernels load an input
// once for a run of outputs.
inline Conv2dFpropPlan choose_conv2d_fprop(const Conv2dShape& s, const Conv2dAddresses& addresses,
                                           const DeviceInfo& device) {
  if (conv2d_few_channels_supported(s)) {
    if (why_not_stem(ConvDirection::kFprop, s, addresses) == nullptr) {
      return choose_stem(ConvDirection::kFprop, s, device);
    }
    if (const auto config = choose_few_channels_fprop(s, addresses, device)) return *config;
    return choose_direct_fprop(s, /*depthwise=*/false, /*flip=*/false, addresses, device);
  }
  if (conv2d_depthwise_supported(s)) return choose_depthwise_fprop(s, addresses, device);
  const auto product = choose_matrix_product(ConvDirection::kFprop, s, addresses, nullptr, device);
  if (product) return *product;
  return choose_window_product<Conv2dFpropPlan>(ConvDirection::kFprop, s, addresses, nullptr,
                                                device);
}

inline Conv2dDgradPlan choose_conv2d_dgrad(const Conv2dShape& s, const Conv2dAddresses& addresses,
                                           const DeviceInfo& device) {
  if (const auto config = choose_few_channels_dgrad(s, addresses, device)) return *config;
  if (conv2d_depthwise_supported(s)) return choose_depthwise_dgrad(s, addresses, device);
  const auto product = choose_matrix_product(ConvDirection::kDgrad, s, addresses, nullptr, device);
  if (product) return *product;
  return choose_window_product<Conv2dDgradPlan>(ConvDirection::kDgrad, s, addresses, nullptr,
                                                device);
}

// dgrad that adds a gradient like dx, at the address `addend`; or the plain dgrad, if another
// kernel has to add it afterwards.
inline Conv2dDgradPlan choose_conv2d_joined_dgrad(const Conv2dShape& s,
                                                  const Conv2dAddresses& addresses,
                                                  uintptr_t addend, const DeviceInfo& device) {
  const Conv2dDgradPlan plain = choose_conv2d_dgrad(s, addresses, device);
  if (!s.channels_last || addend % 16 != 0 || addresses.x % 16 != 0) return plain;
  const auto joined =
      std::visit([&](const auto& config) { return choose_joined_dgrad(s, config); }, plain.kernel);
  return joined ? Conv2dDgradPlan(*joined) : plain;
}

// Whether the kernel adds the addend.
inline bool adds(const Conv2dDgradPlan& plan) {
  return std::holds_alternative<JoinedDgradConfig>(plan.kernel);
}

// grad_bias: null if it is not wanted.
inline Conv2dWgradPlan choose_conv2d_wgrad(const Conv2dShape& s, const Conv2dAddresses& addresses,
                                           void* grad_bias, const DeviceInfo& device) {
  auto plan = [&](const auto& config) {
    return Conv2dWgradPlan(config, {}, workspace_bytes(s, config));
  };
  if (conv2d_few_channels_supported(s) &&
      why_not_stem(ConvDirection::kWgrad, s, addresses) == nullptr) {
    return plan(choose_stem(ConvDirection::kWgrad, s, device));
  }
  if (const auto config = choose_few_channels_wgrad(s, addresses, device)) return plan(*config);
  if (conv2d_few_channels_wgrad_supported(s)) {
    return plan(choose_direct_wgrad(s, /*depthwise=*/false, addresses, device));
  }
  if (conv2d_depthwise_supported(s)) return choose_depthwise_wgrad(s, addresses, device);
  const auto product =
      choose_matrix_product(ConvDirection::kWgrad, s, addresses, grad_bias, device);
  if (product) return plan(*product);
  return choose_window_product<Conv2dWgradPlan>(ConvDirection::kWgrad, s, addresses, grad_bias,
                                                device);
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

  // The kernels run one after the other and share the workspace. Only the copy of dy, which is the
  // first thing in it, stays for the second gradient.
  int64_t workspace_bytes() const {
    return std::max({input ? input->workspace_bytes : 0, weight ? weight->workspace_bytes : 0,
                     bias ? bias->workspace_bytes : 0});
  }
};

inline Conv2dBackwardPlan choose_conv2d_backward(const Conv2dBackwardParams& p,
                                                 const DeviceInfo& device) {
  const uintptr_t dy = address_of(p.grad_output);
  Conv2dBackwardPlan plan;
  if (p.grad_input != nullptr) {
    const Conv2dAddresses at{address_of(p.grad_input), address_of(p.weight), dy};
    plan.input = p.addend == nullptr
                     ? choose_conv2d_dgrad(p.shape, at, device)
                     : choose_conv2d_joined_dgrad(p.shape, at, address_of(p.addend), device);
  }
  if (p.grad_weight != nullptr) {
    plan.weight = choose_conv2d_wgrad(p.shape, {address_of(p.input), address_of(p.grad_weight), dy},
                                      p.grad_bias, device);
  }
  if (p.grad_bias != nullptr && !(plan.weight && sums_bias(*plan.weight))) {
    plan.bias = choose_conv2d_bias_grad(p.shape, p.grad_output, device);
  }
  return plan;
}

// Whether the last step can write the gradients of the parameters in float32 of 16-bit operands. A
// product without parts stores its tiles in the operands' type, if it is the portable one. The copy
// to another layout moves elements of that type.
inline bool writes_float32(const Conv2dBackwardPlan& plan) {
  if (!plan.weight) return true;
  const auto* portable = std::get_if<ImplicitGemmConfig>(&plan.weight->kernel);
  return !plan.weight->copies.w && (portable == nullptr || portable->splits > 1);
}

template <class... Kernels>
std::string describe(const ConvPlan<Kernels...>& plan) {
  const std::string reason =
      plan.why_portable == nullptr ? "" : std::string(" (") + plan.why_portable + ")";
  return std::visit([](const auto& config) { return describe(config); }, plan.kernel) + reason +
         describe(plan.copies);
}

#ifdef WARPWRIGHT_WITH_CUDA
// A workspace is 16-byte aligned, or null if the plan needs none.
void launch_conv2d(const Conv2dParams& params, const Conv2dFpropPlan& plan, void* workspace,
                   cudaStream_t stream);
void launch_conv2d_backward(const Conv2dBackwardParams& params, const Conv2dBackwardPlan& plan,
                            void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
