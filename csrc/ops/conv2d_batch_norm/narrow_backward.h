// The backward of a 1x1 convolution with few channels and of the batch norm after it, from the
// batch norm's coefficients on, in one kernel:
//   dz = gradient of the convolution's output = f'(.) dy * scale + (x - mean) * slope + offset
//   dx (pixels, C) = dz (pixels, K) w (K, C)        dw (K, C) = dz^T (K, pixels) in (pixels, C)
// dz stays on chip. Layer by layer it is written once and read twice, and is up to four times as
// large as dx. A CTA keeps its part of dw in registers, so K * C is bounded.
//
// Bytes (E = pixels * K elements, e = pixels * C): 2E + 2e. Layer by layer: batch norm's second
// pass 3E, dgrad E + e, wgrad E + e. For 16-bit rows of channels on sm_90a.
#pragma once

#include "ops/conv2d_batch_norm/conv2d_batch_norm.h"

namespace warpwright {

struct NarrowBackwardParams {
  Conv2dShape shape;
  const void* grad_output;   // of the batch norm's output, after the activation
  const void* convolved;     // x, the convolution's output
  const void* input;         // of the convolution
  const void* weight;        // of the convolution
  const void* addend;        // like input: added to its gradient; null: none
  const void* coefficients;  // (kBackwardCoefficients, K), float: batch norm's backward writes them
  NormActivation activation;
  ChannelVector norm_bias;  // for the activation's argument
  void* grad_input;
  void* grad_weight;
  bool float32_weight;  // grad_weight is float32
};

struct NarrowBackwardPlan {
  int chunks;  // of K
  int64_t ctas;
  int64_t workspace_bytes;  // the CTAs' parts of dw, added in order by a second kernel

  static constexpr int kRows = 128, kChunk = 64;  // pixels of a tile, channels of a box
  static constexpr int kMaxChunks = 4;
};

// No plan: the layers' backward kernels run one after the other.
struct NarrowBackwardChoice {
  std::optional<NarrowBackwardPlan> plan;
  const char* why_not;
};

inline NarrowBackwardChoice choose_narrow_backward(const NarrowBackwardParams& p,
                                                   const DeviceInfo& device) {
  using Plan = NarrowBackwardPlan;
  auto none = [](const char* why_not) { return NarrowBackwardChoice{std::nullopt, why_not}; };
  const Conv2dShape& s = p.shape;
  if (!s.sm90 || !s.channels_last || dtype_size(s.dtype) != 2) {
    return none("only 16-bit channels-last images on Hopper");
  }
  if (!is_matrix_product(s)) return none("no 1x1 convolution of stride 1");
  if (s.c > Plan::kChunk || s.k > Plan::kMaxChunks * Plan::kChunk) {
    return none("more than 64 input or 256 output channels");
  }
  // A tile of fewer channels waits for its latencies.
  if (s.k < Plan::kChunk) return none("fewer than 64 output channels");
  if (s.c % 8 != 0 || s.k % 8 != 0) return none("channels are no whole 16-byte vectors");
  if (addresses_of(p.grad_output, p.convolved, p.input, p.weight, p.addend, p.grad_input) % 16) {
    return none("an address is misaligned");
  }
  // With its operands on chip batch norm reads them once, and its result stays in L2.
  if (batch_norm_keeps_all({s.n, s.k, s.h * s.w, true}, s.dtype, /*operands=*/2, device)) {
    return none("batch norm keeps both tensors on chip");
  }
  const int64_t pixels = s.n * s.h * s.w;
  if (pixels >= int64_t{1} << 30) return none("more than 2^30 pixels");
  const int64_t tiles = ceil_div<int64_t>(pixels, Plan::kRows);
  const int64_t ctas = std::min<int64_t>(tiles, device.num_sms);
  return {Plan{static_cast<int>(ceil_div<int64_t>(s.k, Plan::kChunk)), ctas, ctas * s.k * s.c * 4},
          nullptr};
}

inline std::string describe(const NarrowBackwardChoice& choice) {
  if (!choice.plan) return std::string("one after the other (") + choice.why_not + ")";
  return "from batch norm's coefficients to both gradients of the convolution in one kernel: " +
         std::to_string(choice.plan->chunks) + " boxes of 64 channels, " +
         std::to_string(choice.plan->ctas) + " parts of the weight's gradient";
}

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes, 16-byte aligned.
void launch_narrow_backward(const NarrowBackwardParams& params, const NarrowBackwardPlan& plan,
                            void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
