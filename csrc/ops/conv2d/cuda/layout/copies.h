// NCHW convolutions on channels-last kernels. Operands are copied to rows of channels. D is stored
// in planes by the kernel, or copied from rows afterwards.
#pragma once

#include <optional>
#include <string>

#include "ops/conv2d/cuda/implicit_gemm/config.h"
#include "ops/conv2d/cuda/layout/change.h"
#include "ops/conv2d/cuda/layout/patches.h"
#include "ops/conv2d/cuda/matrix_product.h"
#include "ops/conv2d/cuda/sm90/config.h"

namespace warpwright {

constexpr int64_t kCopyAlignment = 256;  // of each copy in the workspace, bytes

// Offsets of a direction's tensors in rows in the workspace. Without one the kernel uses the call's
// tensor. y comes first, so that both gradients find the same copy of dy.
struct LayoutCopies {
  bool rows = false;          // the kernel takes the channels-last problem
  bool sampled = false;       // and x has the pixels that a strided 1 x 1 window reads
  bool patches = false;       // x becomes a matrix of patches; the kernel runs a 1 x 1 convolution
  bool transposes_w = false;  // dgrad in TF32: w is copied to (C, R S, K / groups)
  std::optional<int64_t> x, w, y;
  int64_t bytes = 0;

  Conv2dShape shape(Conv2dShape s) const {
    if (patches) return patch_shape(s);
    s.channels_last |= rows;
    if (sampled) s.h = s.p, s.w = s.q, s.stride_h = s.stride_w = 1;
    return s;
  }
  LayoutTensor x_layout(const Conv2dShape& s) const {
    return sampled ? sampled_layout_of_x(s) : layout_of_x(s);
  }
  void transpose_w(const Conv2dShape& s) {
    transposes_w = true;
    if (w) return;  // of as many bytes
    w = bytes;
    bytes += ceil_div(layout_of_w(s).bytes(), kCopyAlignment) * kCopyAlignment;
  }
  Conv2dAddresses addresses(const Conv2dAddresses& call) const {
    return {x ? 0 : call.x, w ? 0 : call.w, y ? 0 : call.y};
  }
};

// Whether the sm_90a kernel stores the direction's D in planes. wgrad's D is a small weight. The
// phases of dgrad are every second pixel of a plane, so that their stores would be single elements.
inline bool stores_planes(ConvDirection direction, const Conv2dShape& s) {
  if (direction == ConvDirection::kFprop) return layout_of_y(s).has_layouts();
  return direction == ConvDirection::kDgrad && s.stride_h == 1 && s.stride_w == 1 &&
         layout_of_x(s).has_layouts();
}

// A window of one tap that skips pixels of x.
inline bool samples_x(const Conv2dShape& s) {
  return s.taps() == 1 && s.groups == 1 && s.pad_h == 0 && s.pad_w == 0 &&
         (s.stride_h > 1 || s.stride_w > 1) && s.p == ceil_div(s.h, s.stride_h) &&
         s.q == ceil_div(s.w, s.stride_w);
}

// None if a tensor cannot be copied. `planes`: the kernel stores D in planes.
inline std::optional<LayoutCopies> choose_layout_copies(ConvDirection direction,
                                                        const Conv2dShape& s, bool planes) {
  LayoutCopies copies{.rows = true, .sampled = samples_x(s)};
  bool possible = true;
  auto copy = [&](const LayoutTensor& tensor, bool is_d) -> std::optional<int64_t> {
    if (!tensor.has_layouts() || (is_d && planes)) return std::nullopt;
    possible = possible && tensor.can_change();
    const int64_t offset = copies.bytes;
    copies.bytes += ceil_div(tensor.bytes(), kCopyAlignment) * kCopyAlignment;
    return offset;
  };
  copies.y = copy(layout_of_y(s), direction == ConvDirection::kFprop);
  copies.x = copy(copies.x_layout(s), direction == ConvDirection::kDgrad);
  copies.w = copy(layout_of_w(s), direction == ConvDirection::kWgrad);
  if (!possible) return std::nullopt;
  return copies;
}

// ---- products of windows ----

struct RowsProduct {
  std::variant<TmaIm2colConfig, MatrixProductConfig, ImplicitGemmConfig> kernel;
  LayoutCopies copies;
};

// The kernels read the weights of dgrad in TF32 along the filters.
inline bool transposes_w(ConvDirection direction, const Conv2dShape& s) {
  return direction == ConvDirection::kDgrad && gemm_kind(s) == GemmKind::kTf32;
}

// The tile for D in planes. A short k leaves the time to the store. The transposed tile stores runs
// of 256 pixels.
inline TmaIm2colTile planes_tile(const Conv2dShape& rows, const TmaIm2colConfig& config) {
  constexpr int64_t kShortK = 4;
  TmaIm2colTile tile = config.tile;
  for_each_part(config.direction, rows, [&](const ConvPart& part) {
    if (part.k_tiles > kShortK) return;
    if (takes_tile(config.direction, rows, TmaIm2colTile::kTransposed)) {
      tile = TmaIm2colTile::kTransposed;
    }
  });
  return tile;
}

// None if the sm_90a kernels would not take the problem in rows. Otherwise they also win with the
// copies: the portable kernel gathers single elements of planes, which takes longer at every size
// that was measured. `sums`: wgrad's bias gradient, null if it is not wanted.
inline std::optional<RowsProduct> choose_rows_product(ConvDirection direction, const Conv2dShape& s,
                                                      const Conv2dAddresses& call, void* sums,
                                                      const DeviceInfo& device) {
  if (!s.sm90 || !has_tma_im2col_type(s)) return std::nullopt;
  const bool planes = stores_planes(direction, s);
  auto copies = choose_layout_copies(direction, s, planes);
  if (!copies) return std::nullopt;
  const Conv2dShape rows = copies->shape(s);
  const Conv2dAddresses addresses = copies->addresses(call);
  if (!planes) {
    const auto product = choose_matrix_product(direction, rows, addresses, sums, device);
    if (product) return RowsProduct{*product, *copies};
  }
  const LayoutCopies plain = *copies;
  if (transposes_w(direction, s)) copies->transpose_w(s);
  const auto portable = choose_implicit_gemm(direction, rows, addresses, device);
  // The time of element gathers in planes, by the estimate for rows: 158 us by 56, and for both
  // gradients 656 by 174 (H200, float32, 1024 x 32 x 14 x 14 -> 64, 3 x 3).
  constexpr double kElementGathers = 3;
  const double cycles = estimate_implicit_gemm(direction, rows, portable, device) *
                        (gemm_kind(s) == GemmKind::kTf32 ? kElementGathers : 1);
  auto config = choose_tma_im2col(direction, rows, copies->addresses(call), sums, cycles, device);
  if (!config) {
    // In rows the portable kernel reads vectors. Below kMinBytes the launches of the copies count.
    constexpr int64_t kMinBytes = int64_t{1} << 20;
    const bool pays = gemm_kind(s) == GemmKind::kTf32 && !planes && portable.vectorized &&
                      layout_of_x(s).bytes() >= kMinBytes;
    if (pays) return RowsProduct{portable, plain};
    return std::nullopt;
  }
  config->stores_planes = planes;
  if (planes) config->tile = planes_tile(rows, *config);
  if (config->splits == 1) {
    config->reason = config->kind == GemmKind::kTf32
                         ? "TF32 NCHW with whole 16-byte vectors of channels"
                         : "16-bit NCHW with whole 16-byte vectors of channels";
  }
  return RowsProduct{*config, *copies};
}

// ---- depthwise ----

// The kernels that take any window run along the channels. In planes they read single elements,
// which takes up to 13 times as long. Below kMinBytes the launches of the copies count.
inline std::optional<LayoutCopies> choose_depthwise_copies(ConvDirection direction,
                                                           const Conv2dShape& s) {
  constexpr int64_t kMinBytes = int64_t{1} << 18;
  if (s.channels_last || dtype_size(s.dtype) != 2 || s.group_k() != 1 ||
      layout_of_x(s).bytes() < kMinBytes) {
    return std::nullopt;
  }
  return choose_layout_copies(direction, s, /*planes=*/false);
}

// ---- patches ----

// None if a tensor cannot be copied.
inline std::optional<LayoutCopies> choose_patch_copies(const Conv2dShape& s) {
  if (!can_copy_patches(s)) return std::nullopt;
  LayoutCopies copies{.patches = true};
  const LayoutTensor y = layout_of_y(s);
  if (!s.channels_last && y.has_layouts()) {
    if (!y.can_change()) return std::nullopt;
    copies.y = 0;
    copies.bytes = ceil_div(y.bytes(), kCopyAlignment) * kCopyAlignment;
  }
  copies.x = copies.bytes;
  copies.bytes += ceil_div(s.n * s.p * s.q * s.c * s.taps() * 2, kCopyAlignment) * kCopyAlignment;
  return copies;
}

// For images of few channels: TMA's im2col needs whole 16-byte vectors of channels. None if another
// kernel takes it. Below kMinBytes the launches of the copies count. `sums` as above.
inline std::optional<RowsProduct> choose_patch_product(ConvDirection direction,
                                                       const Conv2dShape& s,
                                                       const Conv2dAddresses& call, void* sums,
                                                       const DeviceInfo& device) {
  constexpr int64_t kMinBytes = int64_t{1} << 18;
  if (!s.sm90 || s.c % 8 == 0 || layout_of_x(s).bytes() < kMinBytes) return std::nullopt;
  const auto copies = choose_patch_copies(s);
  if (!copies) return std::nullopt;
  const auto product =
      choose_matrix_product(direction, copies->shape(s), copies->addresses(call), sums, device);
  if (!product) return std::nullopt;
  return RowsProduct{*product, *copies};
}

// What the copies add to the description of a plan.
inline std::string describe(const LayoutCopies& copies) {
  std::string names;
  auto add = [&](const std::optional<int64_t>& copy, const char* name) {
    if (copy) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  if (!copies.patches) add(copies.x, "x");
  if (!copies.transposes_w) add(copies.w, "w");
  add(copies.y, "y");
  if (copies.bytes == 0) return "";
  if (!names.empty()) names = "; NHWC copies of " + names;
  if (copies.transposes_w) names = "; w transposed" + names;
  return (copies.patches ? "; the patches of x as rows" : "") + names + ", " +
         std::to_string(ceil_div(copies.bytes, 1 << 20)) + " MiB";
}

}  // namespace warpwright
