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
  bool rows = false;     // the kernel takes the channels-last problem
  bool sampled = false;  // and x has the pixels that a strided 1 x 1 window reads
  bool patches = false;  // x becomes a matrix of patches; the kernel runs a 1 x 1 convolution
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
  std::variant<TmaIm2colConfig, MatrixProductConfig> kernel;
  LayoutCopies copies;
};

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
  if (!s.sm90 || dtype_size(s.dtype) != 2) return std::nullopt;
  const bool planes = stores_planes(direction, s);
  const auto copies = choose_layout_copies(direction, s, planes);
  if (!copies) return std::nullopt;
  const Conv2dShape rows = copies->shape(s);
  const Conv2dAddresses addresses = copies->addresses(call);
  if (!planes) {
    const auto product = choose_matrix_product(direction, rows, addresses, sums, device);
    if (product) return RowsProduct{*product, *copies};
  }
  const auto portable = choose_implicit_gemm(direction, rows, addresses, device);
  const double cycles = estimate_implicit_gemm(direction, rows, portable, device);
  auto config = choose_tma_im2col(direction, rows, addresses, sums, cycles, device);
  if (!config) return std::nullopt;
  config->stores_planes = planes;
  if (planes) config->tile = planes_tile(rows, *config);
  if (config->splits == 1) config->reason = "16-bit NCHW with whole 16-byte vectors of channels";
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
  add(copies.w, "w");
  add(copies.y, "y");
  if (names.empty() && !copies.patches) return "";
  if (!names.empty()) names = "; NHWC copies of " + names;
  return (copies.patches ? "; the patches of x as rows" : "") + names + ", " +
         std::to_string(ceil_div(copies.bytes, 1 << 20)) + " MiB";
}

}  // namespace warpwright
