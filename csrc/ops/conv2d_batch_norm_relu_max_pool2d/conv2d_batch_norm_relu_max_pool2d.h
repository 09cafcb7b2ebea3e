// conv2d_batch_norm_relu_max_pool2d: max_pool2d(relu(batch_norm(conv2d(x, w) + b))) in training,
// for the first layer of a network, whose windows have few elements. The convolution's output is
// never written.
//
// Let v be the window of an output pixel, with T = C * R * S elements, and let m and V be the mean
// and the covariance of v over all N * P * Q windows. Output y_k = w_k v + b_k is linear in v:
//   mean_k = w_k m + b_k,   var_k = w_k V w_k.
// Forward: a kernel sums v and v v^T (T (T + 3) / 2 products per pixel in place of T K), a second
// makes means, variances and the folded weights w_k * scale_k of them, and a third convolves, pools
// and stores the maxima with one byte for each, its winner. The sums are kept for the backward.
// Backward: the gradient dz before batch norm's formula is zero except at winners. With
//   G_k = sum of dz_k,  S_k = sum of dz_k v (one pass over the pooled gradient, its bytes and x),
//   D_k = sum of dz_k (y_k - mean_k) = w_k (S_k - G_k m)
// the gradients are
//   d norm_bias = G,  d norm_weight = rstd D,
//   dw = norm_weight rstd (S - G m - rstd^2 D V w),  db = 0,
// because batch norm subtracts whatever b adds.
// Bytes (E = x, O = output, C = O / 4): forward 2E + O + C, backward E + O + C. One op after the
// other also moves Y, the convolution's output, 3 times forward and 4 times backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "common/ceil_div.h"
#include "ops/batch_norm/batch_norm.h"
#include "ops/conv2d/conv2d.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace warpwright {

struct ConvNormPoolShape {
  Conv2dShape conv;
  MaxPool2dGeometry pool;  // of the convolution's output

  constexpr int64_t elements() const { return conv.c * conv.r * conv.s; }  // T
  constexpr int64_t windows() const { return conv.n * conv.p * conv.q; }
};

// float32. x, w, output and codes are dense, in the layout of shape.conv.
struct ConvNormPoolParams {
  ConvNormPoolShape shape;
  const float* input;
  const float* weight;
  const float* bias;  // (k), or null
  ChannelVector norm_weight, norm_bias;
  ChannelVector running_mean, running_var;  // updated if present
  double momentum, eps;
  float* output;     // pooled
  SmallCode* codes;  // like output; null: not wanted
  float* mean;       // (k)
  float* rstd;       // (k)
  double* moments;   // (window_sums(T)); null: not wanted
};

// A null gradient is not wanted.
struct ConvNormPoolBackwardParams {
  ConvNormPoolShape shape;
  const float* grad_output;
  const SmallCode* codes;
  const float* input;
  const float* weight;
  ChannelVector norm_weight;
  const float* rstd;
  const double* moments;    // of the forward; null: they are computed again
  float* grad_weight;       // like weight
  float* grad_bias;         // (k)
  float* grad_norm_weight;  // (k)
  float* grad_norm_bias;    // (k)
};

// ---- plan ----

constexpr int kConvNormPoolThreads = 256;

// Windows with kernels: input channels x rows x columns.
enum class FewElements { k1x3x3, k1x5x5, k3x3x3 };

struct ConvNormPoolPlan {
  FewElements window;
  // A tile of the convolution's output in one image, both extents even.
  int tile_p, tile_q;
  int64_t tiles_p, tiles_q;  // per image
  int64_t moments_blocks;    // of the kernel that sums v and v v^T
  int64_t blocks;            // of the kernel that convolves and pools
  int64_t winner_blocks;     // of the kernel that sums dz v
  int64_t moments_bytes;     // workspace of the sums of v and v v^T, which comes first
  int64_t workspace_bytes;   // forward
  int64_t backward_workspace_bytes;
};

// Sums of v and v v^T, without the product of a pair twice.
constexpr int64_t window_sums(int64_t elements) { return elements * (elements + 3) / 2; }

// Channels of a thread: the folded weights and the sums of both fit the registers.
constexpr int channels_per_thread(int64_t elements) { return elements <= 9 ? 4 : 2; }

// By the kernels' registers: of the one that convolves and pools, and of the one that sums dz v.
constexpr int pooling_blocks_per_sm(int64_t elements, bool channels_last) {
  return elements <= 9 && channels_last ? 3 : 2;
}
constexpr int kWinnerBlocksPerSm = 2;

// No plan: one op runs after the other.
struct ConvNormPoolChoice {
  std::optional<ConvNormPoolPlan> plan;
  const char* why_not;
};

// Of `c` input channels, `r` rows and `s` columns.
constexpr std::optional<FewElements> few_elements(int64_t c, int64_t r, int64_t s) {
  if (c == 1 && r == 3 && s == 3) return FewElements::k1x3x3;
  if (c == 1 && r == 5 && s == 5) return FewElements::k1x5x5;
  if (c == 3 && r == 3 && s == 3) return FewElements::k3x3x3;
  return std::nullopt;
}

// Null if the kernels take the filters and the pool's windows, whatever the image's extents.
inline const char* why_not_windows(const Conv2dShape& s, const MaxPool2dGeometry& pool) {
  if (s.dtype != DType::kFloat32) return "float32 only";
  if (!few_elements(s.c, s.r, s.s)) {
    return "only windows of 3x3 or 5x5 of one channel, and 3x3 of three";
  }
  if (s.groups != 1 || s.stride_h != 1 || s.stride_w != 1 || s.dilation_h != 1 ||
      s.dilation_w != 1) {
    return "only stride 1 without groups or dilation";
  }
  const bool halves = pool.kernel_h == 2 && pool.kernel_w == 2 && pool.stride_h == 2 &&
                      pool.stride_w == 2 && pool.pad_h == 0 && pool.pad_w == 0 &&
                      pool.dilation_h == 1 && pool.dilation_w == 1;
  if (!halves) return "only pools of 2x2 with stride 2 inside the image";
  constexpr int64_t kMaxChannels = 512;
  if (s.k % channels_per_thread(s.c * s.r * s.s) != 0 || s.k > kMaxChannels) {
    return "output channels are no multiple of 4, or more than 512";
  }
  return nullptr;
}

inline ConvNormPoolChoice choose_conv2d_batch_norm_relu_max_pool2d(const ConvNormPoolShape& shape,
                                                                   const DeviceInfo& device) {
  auto none = [](const char* why_not) { return ConvNormPoolChoice{std::nullopt, why_not}; };
  const Conv2dShape& s = shape.conv;
  const MaxPool2dGeometry& pool = shape.pool;
  if (const char* why_not = why_not_windows(s, pool)) return none(why_not);
  if (pool.out_height == 0 || pool.out_width == 0 || pool.out_height != s.p / 2 ||
      pool.out_width != s.q / 2) {
    return none("only pools of 2x2 with stride 2 inside the image");
  }
  constexpr int64_t kMaxExtent = int64_t{1} << 14;
  if (std::max({s.h, s.w, s.p, s.q}) > kMaxExtent) return none("an extent over 2^14");

  ConvNormPoolPlan plan{.window = *few_elements(s.c, s.r, s.s)};
  constexpr int64_t kMaxColumns = 64, kTileOutputs = 1024;
  const int64_t even_p = ceil_div<int64_t>(s.p, 2) * 2, even_q = ceil_div<int64_t>(s.q, 2) * 2;
  plan.tile_q = static_cast<int>(std::min(even_q, kMaxColumns));
  plan.tile_p = static_cast<int>(std::min(even_p, kTileOutputs / plan.tile_q / 2 * 2));
  plan.tiles_p = ceil_div<int64_t>(s.p, plan.tile_p);
  plan.tiles_q = ceil_div<int64_t>(s.q, plan.tile_q);
  const int64_t tiles = s.n * plan.tiles_p * plan.tiles_q;
  // Tiles, and strips of 16 rows by 32 columns, are counted in 32 bits.
  if (s.n * ceil_div<int64_t>(s.p, 16) * ceil_div<int64_t>(s.q, 32) >= int64_t{1} << 30) {
    return none("more than 2^30 tiles");
  }
  plan.moments_blocks = std::min<int64_t>(tiles, device.num_sms);
  plan.blocks = std::min<int64_t>(
      tiles, int64_t{device.num_sms} * pooling_blocks_per_sm(shape.elements(), s.channels_last));
  plan.winner_blocks = std::min<int64_t>(tiles, int64_t{device.num_sms} * kWinnerBlocksPerSm);
  plan.moments_bytes = window_sums(shape.elements()) * plan.moments_blocks * 8;
  plan.workspace_bytes = plan.moments_bytes + (shape.elements() + 1) * s.k * 4;
  plan.backward_workspace_bytes =
      plan.moments_bytes + (shape.elements() + 1) * s.k * plan.winner_blocks * 4;
  return {plan, nullptr};
}

inline std::string describe(const ConvNormPoolChoice& choice) {
  if (!choice.plan) return std::string("one op after the other (") + choice.why_not + ")";
  const ConvNormPoolPlan& plan = *choice.plan;
  return "statistics from the windows' moments, convolution and pool in one kernel, tiles of " +
         std::to_string(plan.tile_p) + "x" + std::to_string(plan.tile_q) +
         " outputs (few elements per window: the convolution's output is never written)";
}

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace` has the plan's workspace_bytes or backward_workspace_bytes.
void launch_conv2d_batch_norm_relu_max_pool2d(const ConvNormPoolParams& params,
                                              const ConvNormPoolPlan& plan, void* workspace,
                                              cudaStream_t stream);
void launch_conv2d_batch_norm_relu_max_pool2d_backward(const ConvNormPoolBackwardParams& params,
                                                       const ConvNormPoolPlan& plan,
                                                       void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
