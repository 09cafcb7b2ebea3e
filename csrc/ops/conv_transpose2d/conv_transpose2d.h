// conv_transpose2d: y[n,c,h*stride+r*dilation-pad,...] += sum over k of x[n,k,h,...] * w[k,c,r,s],
// plus a bias per channel c. It is the input gradient (dgrad) of a convolution that maps y to x, so
// Conv2dShape describes it: c, h, w are y's and k, p, q are x's. The gradients are that
// convolution's forward (of x) and its weight gradient with y's gradient as the image.
//
// If stride == kernel, each pixel of y gets one product. One matrix product then computes all taps:
//   D (n p q, r s c) = x (n p q, k) w (k, r s c)
// and its epilogue stores each column of D at the pixel of its tap: depth to space.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ops/conv2d/plan.h"

namespace warpwright {

struct ConvTranspose2dParams {
  Conv2dShape shape;
  const void* input;   // (n, k, p, q), dense
  const void* weight;  // (k, c / groups, r, s), dense
  const void* bias;    // (c), or null
  void* output;        // (n, c, h, w)
  int64_t pitch;       // elements between pixels of a channels-last output: at least c
};

// ---- depth to space ----

struct DepthToSpaceConfig {
  GemmParams product;
  GemmPlan plan;
};

// y has no row or column that no window reaches.
inline bool windows_cover(const Conv2dShape& s) {
  return windows_are_patches(s) && s.p * s.r == s.h && s.q * s.s == s.w;
}

inline GemmParams depth_to_space_product(const ConvTranspose2dParams& p) {
  const Conv2dShape& s = p.shape;
  const int64_t columns = s.taps() * s.c;
  GemmParams product{};
  product.m = s.n * s.p * s.q;
  product.n = columns;
  product.k = s.k;
  product.a = make_operand(p.input, s.dtype, s.k, 1);
  product.b = make_operand(p.weight, s.dtype, 1, columns);
  product.bias = p.bias;
  product.d = p.output;
  product.sm90 = s.sm90;
  return product;
}

// Null if the product with depth to space computes the call, else the reason why not.
inline const char* why_not_depth_to_space(const ConvTranspose2dParams& p) {
  const Conv2dShape& s = p.shape;
  if (!s.sm90) return "no sm_90a";
  if (dtype_size(s.dtype) != 2) return "not a 16-bit type";
  if (!s.channels_last) return "NCHW";
  if (!windows_cover(s)) return "windows overlap or leave gaps";
  if (s.c % 8 != 0 || s.k % 8 != 0 || p.pitch % 8 != 0) {
    return "channels are not whole 16-byte vectors";
  }
  if (address_of(p.output) % 16 != 0) return "an address is no multiple of 16 bytes";
  if (address_of(p.bias) % 4 != 0) return "the bias is not aligned to pairs";
  const GemmParams product = depth_to_space_product(p);
  if (!product.a.aligned || !product.b.aligned) return "an address is no multiple of 16 bytes";
  return why_not_sm90(product);
}

// None if dgrad computes the call. The tile: 128x128, whose stores overlap the other warpgroup's
// products, or 64x64 if that fills more SMs.
inline std::optional<DepthToSpaceConfig> choose_depth_to_space(const ConvTranspose2dParams& p,
                                                               const DeviceInfo& device) {
  if (why_not_depth_to_space(p) != nullptr) return std::nullopt;
  DepthToSpaceConfig config{depth_to_space_product(p), GemmPlan{}};
  GemmPlan& plan = config.plan;
  plan.variant = GemmVariant::kSm90;
  plan.kind = GemmKind::k16Bit;
  plan.loading = Sm90Loading::kTma;
  plan.splits = 1;
  plan.cluster = 1;
  const Sm90Product product = sm90_product(config.product, plan);
  const double large = estimate_sm90_cycles(product, GemmTile::k128x128, 1, device);
  const double small = estimate_sm90_cycles(product, GemmTile::k64x64, 1, device);
  plan.tile = small < large ? GemmTile::k64x64 : GemmTile::k128x128;
  plan.cycles = std::min(small, large);
  plan.reason = small < large ? "small tiles fill more SMs, or leave fewer columns empty"
                              : "the stores of a tile overlap the products of the next";
  return config;
}

inline std::string describe(const DepthToSpaceConfig& config) {
  return "one product of all taps, depth to space as it stores, with the bias: " +
         describe(config.product, config.plan);
}

// ---- the forward ----

struct ConvTranspose2dPlan {
  std::optional<DepthToSpaceConfig> product;
  std::optional<Conv2dDgradPlan> dgrad;  // if there is no product; a bias is added afterwards
  const char* why_not;                   // the product; null if it computes the call

  int64_t workspace_bytes() const { return dgrad ? dgrad->workspace_bytes : 0; }
};

inline ConvTranspose2dPlan choose_conv_transpose2d(const ConvTranspose2dParams& p,
                                                   const DeviceInfo& device) {
  ConvTranspose2dPlan plan{};
  plan.why_not = why_not_depth_to_space(p);
  plan.product = choose_depth_to_space(p, device);
  if (plan.product) return plan;
  plan.dgrad = choose_conv2d_dgrad(
      p.shape, {address_of(p.output), address_of(p.weight), address_of(p.input)}, device);
  return plan;
}

inline std::string describe(const ConvTranspose2dPlan& plan) {
  if (plan.product) return describe(*plan.product);
  return "the input gradient of a convolution: " + describe(*plan.dgrad) +
         ", a bias in a pass of its own (" + plan.why_not + ")";
}

// ---- the backward ----

// The rows of a gradient of y as those of a 1 x 1 convolution's output: for the sums over them.
inline Conv2dShape bias_shape(Conv2dShape s) {
  s.k = s.c, s.p = s.h, s.q = s.w;
  return s;
}

struct ConvTranspose2dBackwardParams {
  Conv2dShape shape;
  const void* grad_output;  // (n, c, h, w), dense
  const void* input;        // null if no wanted gradient reads it; the same of the weight
  const void* weight;
  void* grad_input;  // a null gradient is not wanted
  void* grad_weight;
  void* grad_bias;
};

struct ConvTranspose2dBackwardPlan {
  std::optional<Conv2dFpropPlan> input;  // none: not wanted
  std::optional<Conv2dWgradPlan> weight;
  std::optional<Conv2dBiasGradPlan> bias;

  // The kernels run one after the other and share the workspace.
  int64_t workspace_bytes() const {
    return std::max({input ? input->workspace_bytes : 0, weight ? weight->workspace_bytes : 0,
                     bias ? bias->workspace_bytes : 0});
  }
};

inline ConvTranspose2dBackwardPlan choose_conv_transpose2d_backward(
    const ConvTranspose2dBackwardParams& p, const DeviceInfo& device) {
  const uintptr_t dy = address_of(p.grad_output);
  ConvTranspose2dBackwardPlan plan{};
  if (p.grad_input != nullptr) {
    plan.input =
        choose_conv2d_fprop(p.shape, {dy, address_of(p.weight), address_of(p.grad_input)}, device);
  }
  if (p.grad_weight != nullptr) {
    plan.weight = choose_conv2d_wgrad(p.shape, {dy, address_of(p.grad_weight), address_of(p.input)},
                                      nullptr, device);
  }
  if (p.grad_bias != nullptr) {
    plan.bias = choose_conv2d_bias_grad(bias_shape(p.shape), p.grad_output, device);
  }
  return plan;
}

#ifdef WARPWRIGHT_WITH_CUDA
// A workspace is 16-byte aligned, or null if the plan needs none.
void launch_conv_transpose2d(const ConvTranspose2dParams& params, const ConvTranspose2dPlan& plan,
                             void* workspace, cudaStream_t stream);
void launch_conv_transpose2d_backward(const ConvTranspose2dBackwardParams& params,
                                      const ConvTranspose2dBackwardPlan& plan, void* workspace,
                                      cudaStream_t stream);
#endif

}  // namespace warpwright
