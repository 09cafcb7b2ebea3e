// conv2d: y[n,k,p,q] = b[k] + sum over c,r,s of x[n,c,p*stride+r*dilation-pad,...] * w[k,c,r,s],
// and its gradients. All tensors of a call share one dense layout, NCHW/KCRS or NHWC/KRSC, which is
// read and written in place: no im2col buffer and no layout copy in memory. 2*N*P*Q*K*C/groups*R*S
// FLOPs a direction; memory-bound where C/groups*R*S or K/groups is small.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "gemm/gemm.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct Conv2dShape {
  DType dtype;
  bool channels_last;
  bool allow_tf32;                                                   // fp32 on tensor cores
  int64_t n, c, h, w;                                                // input
  int64_t k, r, s;                                                   // weight: k x c/groups x r x s
  int64_t p, q;                                                      // output: n x k x p x q
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;  // pad: before the first row
  int64_t groups;

  int64_t group_c() const { return c / groups; }
  int64_t group_k() const { return k / groups; }
  int64_t taps() const { return r * s; }
};

// Cuts strides and dilations to the least that give the same windows. One step of h + pad_h rows
// leaves the image, whatever position or tap it starts from, and so does any longer step.
inline void fit_windows(Conv2dShape& s) {
  const int64_t past_h = std::max<int64_t>(s.h + s.pad_h, 1);
  const int64_t past_w = std::max<int64_t>(s.w + s.pad_w, 1);
  s.stride_h = std::min(s.stride_h, past_h);
  s.stride_w = std::min(s.stride_w, past_w);
  s.dilation_h = std::min(s.dilation_h, past_h);
  s.dilation_w = std::min(s.dilation_w, past_w);
}

// Largest padded extent of an image. On the CPU rows, columns and offsets have 64 bits, and 2^48
// elements are more than an address space. The CUDA kernels hold a row or column in 32 bits, and
// the sum of two of them.
constexpr int64_t kMaxPaddedCpu = int64_t{1} << 48;
constexpr int64_t kMaxPaddedCuda = int64_t{1} << 30;

struct Conv2dParams {
  Conv2dShape shape;
  const void* input;
  const void* weight;
  const void* bias;  // (k), or null
  void* output;
};

// A null gradient is not wanted. `input` and `weight` may be null if no wanted gradient reads them.
struct Conv2dBackwardParams {
  Conv2dShape shape;
  const void* grad_output;
  const void* input;
  const void* weight;
  void* grad_input;
  void* grad_weight;
  void* grad_bias;
  void* workspace = nullptr;  // conv2d_workspace_bytes() of the weight gradient
};

// ---- GPU: choice of kernel ----

enum class ConvDirection { kForward, kInputGradient, kWeightGradient };

struct Conv2dConfig {
  GemmKind kind;
  GemmTile tile;           // k128x128, k128x64, k64x64Gathered or k64x64Elements
  bool vectorized;         // 16-byte gathers along the channels (NHWC)
  bool vectorized_weight;  // of the weights too
  int splits;              // weight gradient: runs of pixels, summed in order by a second kernel
  const char* reason;
};

inline GemmKind gemm_kind(const Conv2dShape& s) { return gemm_kind(s.dtype, s.allow_tf32); }

// Do pixels of one tile fit 16-bit rows and columns and a 32-bit offset from each other?
constexpr bool fits_compact_coords(const Conv2dShape& s) {
  constexpr int64_t kMaxExtent = 16000, kTilePixels = 128;
  auto spans = [&](int64_t pixels, int64_t image) {
    return (kTilePixels / std::max<int64_t>(pixels, 1) + 2) * image < (int64_t{1} << 31);
  };
  return s.h + 2 * s.pad_h + s.r * s.dilation_h < kMaxExtent &&
         s.w + 2 * s.pad_w + s.s * s.dilation_w < kMaxExtent && spans(s.p * s.q, s.c * s.h * s.w) &&
         spans(s.h * s.w / (s.stride_h * s.stride_w), s.k * s.p * s.q);
}

// FMA has one tile; the tile that tensor cores would take rates its gathers (gather_rates).
inline TileShape conv2d_tile(GemmKind kind, GemmTile tile) {
  return portable_tile(kind, uses_tensor_cores(kind) ? tile : GemmTile::k64x64Elements);
}

// Estimated cycles of the groups' products (m, n, k), and of the sum of their parts of
// `part_bytes` each.
inline double estimate_conv2d(const Conv2dShape& s, GemmTile tile, int64_t m, int64_t n, int64_t k,
                              int splits, double part_bytes, const DeviceInfo& device) {
  const GemmKind kind = gemm_kind(s);
  const TileShape shape = conv2d_tile(kind, tile);
  const PortableRates rates = gather_rates(kind, tile);
  const int64_t blocks = ceil_div(m, shape.blk_m) * ceil_div(n, shape.blk_n) * s.groups * splits;
  return estimate_portable_cycles(shape, blocks, ceil_div(ceil_div(k, shape.blk_k), splits), rates,
                                  device) +
         estimate_split_cycles(splits, 2.0 * splits * part_bytes, rates);
}

// Parts of the weight gradient that fill whole waves, stay within 64 MiB and have work for their
// ring.
inline int choose_conv2d_splits(const Conv2dShape& s, GemmTile tile, const DeviceInfo& device) {
  constexpr int64_t kMostSplits = 264;
  const TileShape shape = conv2d_tile(gemm_kind(s), tile);
  const int64_t depth = s.group_c() * s.taps();
  const int64_t pixels = s.n * s.p * s.q;
  const int64_t bytes = s.k * depth * (s.dtype == DType::kFloat64 ? 8 : 4);
  const int64_t most = std::clamp<int64_t>(
      std::min(ceil_div(pixels, shape.blk_k) / 8, kMaxSplitBytes / std::max<int64_t>(bytes, 1)), 1,
      kMostSplits);
  const int64_t tiles =
      ceil_div(s.group_k(), shape.blk_m) * ceil_div(depth, shape.blk_n) * s.groups;
  double best = -1;
  int best_splits = 1;
  for (int64_t waves = 0; waves <= 8; ++waves) {
    const int64_t blocks = waves * device.num_sms * shape.ctas_per_sm;
    const int splits =
        static_cast<int>(std::clamp<int64_t>(blocks / std::max<int64_t>(tiles, 1), 1, most));
    const double total = estimate_conv2d(s, tile, s.group_k(), depth, pixels, splits,
                                         static_cast<double>(bytes), device);
    if (best < 0 || total < best) {
      best = total;
      best_splits = splits;
    }
  }
  return best_splits;
}

// `addresses`: the operands' addresses or-ed together.
inline Conv2dConfig choose_conv2d_config(ConvDirection direction, const Conv2dShape& s,
                                         uintptr_t addresses, const DeviceInfo& device) {
  Conv2dConfig config{};
  config.kind = gemm_kind(s);
  config.tile = GemmTile::k64x64Elements;
  config.splits = 1;
  const int64_t vec = 16 / dtype_size(s.dtype);
  // Which channels the accesses run along: of the input forward, of grad_output and the weight for
  // the input gradient, of both for the weight gradient.
  const bool whole_c = s.group_c() % vec == 0, whole_k = s.group_k() % vec == 0;
  config.vectorized = s.channels_last && addresses % 16 == 0 && fits_compact_coords(s) &&
                      (direction == ConvDirection::kForward || whole_k) &&
                      (direction == ConvDirection::kInputGradient || whole_c);
  config.vectorized_weight = config.vectorized && whole_c;
  config.reason = config.vectorized ? "NHWC with whole 16-byte vectors of channels"
                  : s.channels_last ? "channels are not whole 16-byte vectors: element gathers"
                                    : "NCHW: element gathers along the rows of the image";
  const int64_t depth = s.group_c() * s.taps();
  if (direction == ConvDirection::kWeightGradient) {
    if (config.vectorized) {
      // A 128-row tile would be half empty.
      const bool small = s.group_k() <= 64 || depth <= 64;
      config.tile = small ? GemmTile::k64x64Gathered : GemmTile::k128x128;
    }
    config.splits = choose_conv2d_splits(s, config.tile, device);
  } else if (config.vectorized) {
    const bool forward = direction == ConvDirection::kForward;
    const int64_t m = forward ? s.n * s.p * s.q : s.n * s.h * s.w;
    const int64_t n = forward ? s.group_k() : s.group_c();
    const int64_t k = forward ? depth : s.group_k() * s.taps();
    auto cycles = [&](GemmTile tile) { return estimate_conv2d(s, tile, m, n, k, 1, 0, device); };
    config.tile = config.vectorized_weight && cycles(GemmTile::k128x128) < cycles(GemmTile::k128x64)
                      ? GemmTile::k128x128
                      : GemmTile::k128x64;
  }
  if (!uses_tensor_cores(config.kind)) config.tile = GemmTile::k64x64Elements;
  return config;
}

inline int64_t conv2d_workspace_bytes(const Conv2dShape& s, const Conv2dConfig& config) {
  if (config.splits <= 1) return 0;
  return config.splits * s.k * s.group_c() * s.taps() * (s.dtype == DType::kFloat64 ? 8 : 4);
}

inline std::string describe(const Conv2dConfig& config) {
  std::string text = "portable implicit GEMM, " + describe_portable_tile(config.kind, config.tile);
  if (config.splits > 1) text += ", split-k " + std::to_string(config.splits);
  return text + " (" + config.reason + ")";
}

// ---- entries ----

void conv2d_cpu(const Conv2dParams& params);
void conv2d_backward_cpu(const Conv2dBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_conv2d_forward(const Conv2dParams& params, const Conv2dConfig& config,
                           cudaStream_t stream);
void launch_conv2d_input_gradient(const Conv2dBackwardParams& params, const Conv2dConfig& config,
                                  cudaStream_t stream);
void launch_conv2d_weight_gradient(const Conv2dBackwardParams& params, const Conv2dConfig& config,
                                   cudaStream_t stream);
#endif

}  // namespace warpwright
