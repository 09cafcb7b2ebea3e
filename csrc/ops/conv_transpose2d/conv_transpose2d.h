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
#include <limits>
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
  bool after_copy;     // the kernel before is launch_copy_rows() with next_overlaps
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
  product.overlap.previous = p.after_copy;
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
  const void* grad_output;  // (n, c, h, w)
  int64_t pitch;            // elements between pixels of a channels-last grad_output: at least c
  const void* input;        // null if no wanted gradient reads it; the same of the weight
  const void* weight;
  void* grad_input;  // a null gradient is not wanted
  void* grad_weight;
  void* grad_bias;

  // A gradient of a slice of channels, as the gradient of a concatenation has them.
  bool is_pitched() const { return pitch != shape.c; }
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

// The kernel of a direction whose image is a pitched gradient: windows by TMA, which takes a pitch.
inline std::optional<TmaIm2colConfig> choose_pitched_windows(ConvDirection direction,
                                                             const Conv2dShape& s,
                                                             const Conv2dAddresses& addresses,
                                                             const DeviceInfo& device) {
  constexpr double kNoOther = std::numeric_limits<double>::infinity();
  return choose_tma_im2col(direction, s, addresses, nullptr, kNoOther, device);
}

inline Conv2dAddresses grad_input_addresses(const ConvTranspose2dBackwardParams& p) {
  return {address_of(p.grad_output), address_of(p.weight), address_of(p.grad_input)};
}
inline Conv2dAddresses grad_weight_addresses(const ConvTranspose2dBackwardParams& p) {
  return {address_of(p.grad_output), address_of(p.grad_weight), address_of(p.input)};
}

inline ColumnSumParams pitched_bias_columns(const ConvTranspose2dBackwardParams& p) {
  const Conv2dShape& s = p.shape;
  return {.dtype = s.dtype,
          .rows = s.n * s.h * s.w,
          .cols = s.c,
          .matrix = p.grad_output,
          .stride_row = p.pitch,
          .stride_col = 1,
          .sum = p.grad_bias};
}

// Null if kernels read a gradient with this pitch, else the reason why it has to be copied.
inline const char* why_not_pitched(const ConvTranspose2dBackwardParams& p,
                                   const DeviceInfo& device) {
  const Conv2dShape& s = p.shape;
  if (!s.sm90) return "no sm_90a";
  if (dtype_size(s.dtype) != 2) return "not a 16-bit type";
  if (!s.channels_last) return "NCHW";
  if (p.pitch % 8 != 0) return "pixels do not start at multiples of 16 bytes";
  const auto has = [&](ConvDirection direction, const Conv2dAddresses& addresses) {
    return choose_pitched_windows(direction, s, addresses, device).has_value();
  };
  if (p.grad_input != nullptr && !has(ConvDirection::kFprop, grad_input_addresses(p))) {
    return "TMA does not take the windows of the input's gradient";
  }
  if (p.grad_weight != nullptr && !has(ConvDirection::kWgrad, grad_weight_addresses(p))) {
    return "TMA does not take the windows of the weight's gradient";
  }
  return nullptr;
}

// A pitched gradient: only if why_not_pitched() knows no reason.
inline ConvTranspose2dBackwardPlan choose_conv_transpose2d_backward(
    const ConvTranspose2dBackwardParams& p, const DeviceInfo& device) {
  const Conv2dShape& s = p.shape;
  ConvTranspose2dBackwardPlan plan{};
  if (p.grad_input != nullptr) {
    const Conv2dAddresses at = grad_input_addresses(p);
    plan.input =
        p.is_pitched()
            ? Conv2dFpropPlan(*choose_pitched_windows(ConvDirection::kFprop, s, at, device))
            : choose_conv2d_fprop(s, at, device);
  }
  if (p.grad_weight != nullptr) {
    const Conv2dAddresses at = grad_weight_addresses(p);
    if (p.is_pitched()) {
      const auto config = choose_pitched_windows(ConvDirection::kWgrad, s, at, device);
      plan.weight = Conv2dWgradPlan(*config, {}, config->workspace_bytes);
    } else {
      plan.weight = choose_conv2d_wgrad(s, at, nullptr, device);
    }
  }
  if (p.grad_bias != nullptr && p.is_pitched()) {
    BiasGradConfig config{};
    config.columns = choose_column_sum(pitched_bias_columns(p), device, {.ctas_per_sm = 4});
    plan.bias = Conv2dBiasGradPlan{config, config.columns.workspace_bytes};
  } else if (p.grad_bias != nullptr) {
    plan.bias = choose_conv2d_bias_grad(bias_shape(s), p.grad_output, device);
  }
  return plan;
}

// ---- copies of rows ----

// Rows of `row_bytes`, `from_pitch` bytes apart, to rows `to_pitch` bytes apart: a slice of
// channels of a channels-last image, or from one.
struct CopyRowsParams {
  const void* from;
  void* to;
  int64_t rows, row_bytes;
  int64_t from_pitch, to_pitch;
  bool next_overlaps;  // the next kernel does not depend on this one, and outlasts it
};

struct CopyRowsPlan {
  int vector;  // bytes per access: 16, 8, 4, 2 or 1
};

inline CopyRowsPlan choose_copy_rows(const CopyRowsParams& p) {
  const auto all = address_of(p.from) | address_of(p.to) | static_cast<uintptr_t>(p.row_bytes) |
                   static_cast<uintptr_t>(p.from_pitch) | static_cast<uintptr_t>(p.to_pitch);
  int vector = 16;
  while (all % static_cast<uintptr_t>(vector) != 0) vector /= 2;
  return {vector};
}

inline std::string describe(const CopyRowsPlan& plan) {
  return std::to_string(plan.vector) + "-byte accesses along the channels";
}

#ifdef WARPWRIGHT_WITH_CUDA
// A workspace is 16-byte aligned, or null if the plan needs none.
void launch_conv_transpose2d(const ConvTranspose2dParams& params, const ConvTranspose2dPlan& plan,
                             void* workspace, cudaStream_t stream);
void launch_conv_transpose2d_backward(const ConvTranspose2dBackwardParams& params,
                                      const ConvTranspose2dBackwardPlan& plan, void* workspace,
                                      cudaStream_t stream);
void launch_copy_rows(const CopyRowsParams& params, const CopyRowsPlan& plan, cudaStream_t stream);
#endif

}  // namespace warpwright
