// The input gradient of a 1x1 convolution that reads y = relu(batch norm(x) + residual), as a
// residual block hands it to the next. The kernel that computes dgrad + addend, the gradient of y,
// also takes the two steps of y's backward that need nothing else: the relu's gate, and batch
// norm's sums of the gated gradient and of its product with x - mean. Batch norm's backward then
// reads the gradient once in place of twice, and the residual's gradient is the same tensor.
//
// Bytes, with E those of y, of both kernels together: dgrad + addend reads E (and dy) and writes E.
// Apart, batch norm's backward reads 2E for the sums, and again 2E to write 2E. Here dgrad reads E
// more, and batch norm's backward reads 2E and writes E: 4E in place of 6E. For 16-bit rows of
// channels on sm_90a.
//
// A strided 1x1 convolution in the shortcut reads the pixels at multiples of its strides alone.
// Their gradient is addend enough: with strides of 2 the kernel reads E / 4 of it, and nobody
// writes E of zeros around it.
#pragma once

#include "ops/conv2d_batch_norm/conv2d_batch_norm.h"

namespace warpwright {

struct GatedDgradParams {
  Conv2dBackwardParams conv;  // grad_output, weight, addend; grad_input gets the gated gradient
  // The addend has the pixels of grad_input at multiples of these, (h, w). The others get nothing.
  int64_t addend_stride[2] = {1, 1};
  const void* norm_input;  // x, laid out like grad_input
  const void* mask;        // of the relu, batch_norm_mask_bytes()
  const void* mean;        // (channels), float
  void* sums;              // (channels, 2), float
};

struct GatedDgradPlan {
  int64_t ctas;

  static constexpr int kColumns = 128;  // of a tile, and of a record
  int64_t records() const { return ctas * kMomentsRecords; }
  // The sums (float2) come first, then the records' headers (two int each).
  int64_t workspace_bytes() const { return records() * (kColumns + 1) * 8; }
};

// Rows of D, columns, stages. The boxes of x and of the addend take the place of three stages.
constexpr Sm90TileShape kGatedDgradTile{128, GatedDgradPlan::kColumns, 3, true};

// No plan: dgrad, the gate and the sums have kernels of their own.
struct GatedDgradChoice {
  std::optional<GatedDgradPlan> plan;
  const char* why_not;
};

inline GatedDgradChoice choose_gated_dgrad(const GatedDgradParams& p, const DeviceInfo& device) {
  auto none = [](const char* why_not) { return GatedDgradChoice{std::nullopt, why_not}; };
  const Conv2dShape& s = p.conv.shape;
  if (!s.sm90 || !s.channels_last || dtype_size(s.dtype) != 2) {
    return none("only 16-bit channels-last images on Hopper");
  }
  const Conv2dAddresses at{address_of(p.conv.grad_input), address_of(p.conv.weight),
                           address_of(p.conv.grad_output)};
  const Conv2dDgradPlan plain = choose_conv2d_dgrad(s, at, device);
  const auto* product = std::get_if<MatrixProductConfig>(&plain.kernel);
  if (product == nullptr || product->plan.kind != GemmKind::k16Bit ||
      product->plan.loading != Sm90Loading::kTma) {
    return none("the convolution is no matrix product by TMA");
  }
  if (s.c % 64 != 0 || s.c < kGatedDgradTile.blk_n) return none("channels are no whole tiles");
  const bool vectors = addresses_of(p.conv.grad_input, p.conv.addend, p.norm_input) % 16 == 0 &&
                       addresses_of(p.mask, p.mean) % 8 == 0;
  if (!vectors) return none("an address is misaligned");
  if (batch_norm_keeps_all({s.n, s.c, s.h * s.w, true}, s.dtype, /*operands=*/2, device)) {
    return none("batch norm keeps both tensors on chip and reads them once");
  }
  const int64_t across = ceil_div<int64_t>(s.c, kGatedDgradTile.blk_n);
  const int64_t tiles = ceil_div<int64_t>(s.n * s.h * s.w, kGatedDgradTile.blk_m) * across;
  const int64_t ctas = std::min<int64_t>(tiles, device.num_sms);
  const MomentsTile tile{kGatedDgradTile.blk_m, kGatedDgradTile.blk_n, kGatedDgradTile.ping_pong};
  if (!meets_few_columns(tile, tiles, across, ctas)) {
    return none("a CTA would meet more than two columns of tiles");
  }
  return {GatedDgradPlan{ctas}, nullptr};
}

inline std::string describe(const GatedDgradChoice& choice) {
  if (!choice.plan) {
    return std::string("batch norm takes them from its gradient (") + choice.why_not + ")";
  }
  return "taken by the input gradient, if a shortcut reads the input too: tile " +
         extents(kGatedDgradTile.blk_m, kGatedDgradTile.blk_n) + " ping-pong, " +
         std::to_string(kGatedDgradTile.stages) + " stages, " +
         std::to_string(choice.plan->records()) + " records merged";
}

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes(), 16-byte aligned.
void launch_gated_dgrad(const GatedDgradParams& params, const GatedDgradPlan& plan, void* workspace,
                        cudaStream_t stream);
#endif

}  // namespace warpwright
