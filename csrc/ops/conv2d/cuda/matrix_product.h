// A 1 x 1 convolution of stride 1, without padding and groups, channels last. It is the matrix
// product of `linear` on the pixels, without a copy, if gemm/ has a Hopper kernel for it.
//   fprop  y (NPQ, K) = x (NPQ, C) w^T (C, K) + b
//   dgrad  dx (NPQ, C) = dy (NPQ, K) w (K, C)
//   wgrad  dw (K, C) = dy^T (K, NPQ) x (NPQ, C), with the bias gradient as the sums of dy^T's rows
#pragma once

#include <optional>
#include <string>

#include "gemm/gemm.h"
#include "ops/conv2d/conv2d.h"

namespace warpwright {

struct MatrixProductConfig {
  GemmParams product;
  GemmPlan plan;
};

inline bool is_matrix_product(const Conv2dShape& s) {
  return s.channels_last && s.taps() == 1 && s.stride_h == 1 && s.stride_w == 1 && s.pad_h == 0 &&
         s.pad_w == 0 && s.groups == 1 && s.p == s.h && s.q == s.w;
}

inline GemmParams conv2d_product(ConvDirection direction, const Conv2dShape& s,
                                 const Conv2dAddresses& addresses) {
  const int64_t pixels = s.n * s.p * s.q;
  auto matrix = [&](uintptr_t address, int64_t stride_mn, int64_t stride_k) {
    return make_operand(reinterpret_cast<const void*>(address), s.dtype, stride_mn, stride_k);
  };
  GemmParams p{};
  p.tf32 = s.allow_tf32;
  p.sm90 = s.sm90;
  switch (direction) {
    case ConvDirection::kFprop:
      p.m = pixels, p.n = s.k, p.k = s.c;
      p.a = matrix(addresses.x, s.c, 1);
      p.b = matrix(addresses.w, s.c, 1);
      p.d = reinterpret_cast<void*>(addresses.y);
      break;
    case ConvDirection::kDgrad:
      p.m = pixels, p.n = s.c, p.k = s.k;
      p.a = matrix(addresses.y, s.k, 1);
      p.b = matrix(addresses.w, 1, s.c);
      p.d = reinterpret_cast<void*>(addresses.x);
      break;
    case ConvDirection::kWgrad:
      p.m = s.k, p.n = s.c, p.k = pixels;
      p.a = matrix(addresses.y, 1, s.k);
      p.b = matrix(addresses.x, 1, s.c);
      p.d = reinterpret_cast<void*>(addresses.w);
      break;
  }
  return p;
}

// None if the implicit GEMM takes it. `sums`: wgrad's bias gradient, if it is wanted.
inline std::optional<MatrixProductConfig> choose_matrix_product(ConvDirection direction,
                                                                const Conv2dShape& s,
                                                                const Conv2dAddresses& addresses,
                                                                void* sums,
                                                                const DeviceInfo& device) {
  constexpr int64_t kFewColumns = 64;
  if (!is_matrix_product(s)) return std::nullopt;
  GemmParams product = conv2d_product(direction, s, addresses);
  product.row_sums = sums;
  const GemmPlan plan = choose_gemm(product, device);
  if (plan.variant != GemmVariant::kSm90 && plan.variant != GemmVariant::kShortK) {
    return std::nullopt;
  }
  // TF32 tiles of a product with both operands MN-major have 128 columns. Those of windows have 64.
  const bool is_wgrad = direction == ConvDirection::kWgrad;
  if (is_wgrad && plan.kind == GemmKind::kTf32 && s.c <= kFewColumns) return std::nullopt;
  // Only wgrad has a workspace. Outputs small enough for a split k do not suit large tiles.
  if (!is_wgrad && plan.workspace_bytes > 0) return std::nullopt;
  return MatrixProductConfig{product, plan};
}

inline int64_t workspace_bytes(const Conv2dShape&, const MatrixProductConfig& config) {
  return config.plan.workspace_bytes;
}

inline std::string describe(const MatrixProductConfig& config) {
  return "1x1 as a matrix product: " + describe(config.product, config.plan);
}

}  // namespace warpwright
