// linear_quantized(x, codes, scales, zeros, bias): y (M, N) = x W^T + bias of a weight that is
// stored in integers, w = (q - z) s.
//   int8   codes (N, K) int8, scales (N), no zeros
//   int4   codes (N, K / 2) uint8, the low nibble is the even k; scales (N, K / group); zeros
//          likewise in uint8, or none: then z = 8
// The gradient of x is dy W. Codes, scales and zeros have no derivative.
// Bound for few rows: the bytes of the codes. For many rows: the matrix product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// Codes in the order of the A fragments of mma.m16n8k16. A block is 16 features by 64 k of int4, or
// by 32 k of int8: 16 bytes per lane, 512 per warp. Blocks follow each other along k first. Lane
// (g, t) = (lane / 4, lane % 4) holds of features g and g + 8, in each 32 k, those from 8 t to
// 8 t + 7. The product sums over k in any order as long as both operands agree, so a lane reads the
// activations of its eight k as 16 adjacent bytes.
//   int4: a word has four k of both features. Nibbles 0, 4, 2, 6 are feature g's, in the order of
//         k; 1, 5, 3, 7 are feature g + 8's. One mask then yields a pair of one feature.
//   int8: a word has four k of one feature, as q + 128. The features alternate.
constexpr int64_t kFragmentFeatures = 16;
constexpr int64_t kFragmentBytes = 512;
constexpr int64_t fragment_k(int bits) { return bits == 4 ? 64 : 32; }

struct QuantizedWeight {
  int bits;                   // 4 or 8
  int64_t outputs, features;  // N, K
  int64_t group;              // k per scale: K for int8
  const void* codes;          // dense; fragments begin at a multiple of 16 bytes
  bool fragments;             // in the order above, else plain
  const void* scales;
  DType scale_dtype;
  int64_t scale_strides[2];  // per feature, per group
  const uint8_t* zeros;      // or null
  int64_t zero_strides[2];
};

inline bool has_fragments(int bits, int64_t outputs, int64_t features) {
  return outputs % kFragmentFeatures == 0 && features % fragment_k(bits) == 0;
}

struct LinearQuantizedParams {
  QuantizedWeight weight;
  DType dtype;  // of x, bias and y
  int64_t rows;
  const void* input;
  int64_t input_pitch;  // elements from a row to the next; the columns are adjacent
  const void* bias;     // (N) or null
  void* output;         // (M, N), dense
  bool sm90;            // clusters: sm90_path_available()
  bool
      ahead;  // no pending kernel writes the weight: its loads may pass the end of the previous one
};

// ---- choice ----

constexpr int kQuantizedWarps = 8;
constexpr int kMaxQuantizedBlocks = 4;  // blocks of 16 features per CTA: the sums are in registers
constexpr int kMaxQuantizedRanks = 2;   // CTAs of a cluster, which share k
constexpr int kMaxQuantizedDepth = 8;   // stages of a warp's ring
constexpr int kQuantizedCtasPerSm = 2;
constexpr int64_t kMaxQuantizedRows = 128;  // of x by passes

struct LinearQuantizedPlan {
  bool fused;  // codes become operands in registers; else the weight is written in x's dtype first
  int tiles;   // of 8 tokens per pass
  int64_t passes;
  int blocks;  // of 16 features per CTA
  int ranks;   // CTAs that share k: a cluster
  int depth;   // stages of the ring of each warp
  int early;   // stages of codes that `ahead` copies before the previous kernel ends
  int64_t ctas;
  const char* reason;
};

inline int64_t quantized_smem_per_cta(const DeviceInfo& device) {
  return device.smem_per_block / kQuantizedCtasPerSm - 1024;
}

// One stage of a warp: `blocks` blocks of codes, the activations of the same k, scales, zeros.
struct QuantizedStage {
  int64_t input, scales, zeros, bytes;  // offsets, and the size
};

inline int scale_rows_per_stage(const QuantizedWeight& w) {
  return w.bits == 8 ? 0 : w.group < fragment_k(4) ? 2 : 1;
}

inline QuantizedStage quantized_stage(const QuantizedWeight& w, int blocks, int tiles) {
  const int64_t features = blocks * kFragmentFeatures, rows = scale_rows_per_stage(w);
  QuantizedStage stage{};
  stage.input = blocks * kFragmentBytes;
  stage.scales = stage.input + tiles * (fragment_k(w.bits) / 32) * kFragmentBytes;
  stage.zeros = stage.scales + rows * features * dtype_size(w.scale_dtype);
  stage.bytes = stage.zeros + (w.zeros != nullptr ? rows * features : 0);
  return stage;
}

// Shared memory of the sums of all warps, which replace the ring at the end. Four floats more per
// token keep the lanes of a fragment on different banks.
inline int64_t quantized_sums_bytes(int blocks, int tiles) {
  return int64_t{kQuantizedWarps} * tiles * 8 * (blocks * kFragmentFeatures + 4) * 4;
}

inline int64_t quantized_smem_bytes(const QuantizedWeight& w, const LinearQuantizedPlan& plan) {
  const int64_t ring =
      kQuantizedWarps * plan.depth * quantized_stage(w, plan.blocks, plan.tiles).bytes;
  return std::max(ring, quantized_sums_bytes(plan.blocks, plan.tiles));
}

// Null if the kernel of few rows can take the call, else the reason why not.
inline const char* why_not_fused(const LinearQuantizedParams& p, const DeviceInfo& device) {
  const QuantizedWeight& w = p.weight;
  if (!w.fragments) return "the codes are in their plain order";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "x is no 16-bit type";
  if (device.sm_arch < 80) return "no mma.sync of 16-bit types";
  if (p.rows > kMaxQuantizedRows) return "more than 128 rows: many passes over the codes";
  auto is_aligned = [](const void* data, int64_t pitch) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(pitch)) % 16 == 0;
  };
  if (!is_aligned(p.input, p.input_pitch * 2)) {
    return "the rows of x do not begin at multiples of 16 bytes";
  }
  if (w.bits == 4) {
    if (w.group % 32 != 0 || (w.group > 32 && w.group % 64 != 0)) {
      return "groups are neither 32 nor a multiple of 64";
    }
    const bool adjacent = w.scale_strides[0] == 1 && (w.zeros == nullptr || w.zero_strides[0] == 1);
    if (!adjacent) return "scales or zeros of neighbouring features are not adjacent";
    // Copies have 16 bytes. A row of a whole tensor has 16 features or a multiple.
    const int64_t size = dtype_size(w.scale_dtype);
    if (!is_aligned(w.scales, w.scale_strides[1] * size) ||
        (w.zeros != nullptr && !is_aligned(w.zeros, w.zero_strides[1]))) {
      return "rows of scales or zeros do not begin at multiples of 16 bytes";
    }
  }
  return nullptr;
}

// Shares the weight among CTAs: plan.blocks, ranks and ctas. The cost is that of a CTA in stages
// times blocks, times the waves of CTAs. A stage also costs its loads of x and its waits, about two
// blocks.
inline void share_weight(const LinearQuantizedParams& p, const DeviceInfo& device,
                         LinearQuantizedPlan& plan) {
  const int64_t blocks = p.weight.outputs / kFragmentFeatures;
  const int64_t stages = p.weight.features / fragment_k(p.weight.bits);
  const int64_t slots = int64_t{device.num_sms} * kQuantizedCtasPerSm;
  int64_t best = 0;
  for (int ranks = 1; ranks <= (p.sm90 ? kMaxQuantizedRanks : 1); ranks *= 2) {
    for (int count = kMaxQuantizedBlocks; count >= 1;
         --count) {  // more blocks: x is read less often
      const int64_t ctas = ceil_div(blocks, int64_t{count}) * ranks;
      const int64_t steps = ceil_div(stages, int64_t{kQuantizedWarps} * ranks);
      const int64_t cost = ceil_div(ctas, slots) * steps * (count + 2);
      if (plan.blocks != 0 && cost >= best) continue;
      best = cost;
      plan.blocks = count;
      plan.ranks = ranks;
      plan.ctas = ctas;
    }
  }
}

inline LinearQuantizedPlan choose_linear_quantized(const LinearQuantizedParams& p,
                                                   const DeviceInfo& device) {
  if (const char* why = why_not_fused(p, device)) return {.fused = false, .reason = why};
  LinearQuantizedPlan plan{.fused = true};
  plan.tiles = p.rows <= 8 ? 1 : 2;
  plan.passes = ceil_div(p.rows, int64_t{plan.tiles} * 8);
  share_weight(p, device, plan);
  const int64_t steps =
      ceil_div(p.weight.features, fragment_k(p.weight.bits) * kQuantizedWarps * plan.ranks);
  const int64_t bytes = kQuantizedWarps * quantized_stage(p.weight, plan.blocks, plan.tiles).bytes;
  const int64_t fitting = quantized_smem_per_cta(device) / bytes;
  plan.depth =
      static_cast<int>(std::clamp<int64_t>(std::min(fitting, steps), 1, kMaxQuantizedDepth));
  plan.early = std::min(plan.depth, p.weight.bits == 4 ? 2 : 4);
  plan.reason = "the codes' bytes are the bound: they become operands in registers";
  return plan;
}

inline std::string describe(const LinearQuantizedPlan& plan) {
  if (!plan.fused) {
    return std::string("the weight in x's dtype by a kernel, then linear (") + plan.reason + ")";
  }
  return "mma of " + std::to_string(plan.blocks * kFragmentFeatures) + " features by " +
         std::to_string(plan.tiles * 8) + " tokens, " +
         std::to_string(kQuantizedWarps * plan.ranks) +
         (plan.ranks == 1 ? " warps share k, " : " warps of a cluster share k, ") +
         std::to_string(plan.depth) + " stages per warp, " + std::to_string(plan.ctas) +
         " CTAs, passes over the codes: " + std::to_string(plan.passes) + " (" + plan.reason + ")";
}

// ---- entries ----

// Rows [begin, end) of the weight, each `features` elements of `dtype`, one after another. The
// scales have the same type, float32 or float64.
void dequantize_cpu(const QuantizedWeight& weight, DType dtype, int64_t begin, int64_t end,
                    void* output);

#ifdef WARPWRIGHT_WITH_CUDA
// The whole weight, (N, K) of `dtype`, dense.
void launch_dequantize(const QuantizedWeight& weight, DType dtype, void* output,
                       cudaStream_t stream);
// A plan with `fused`.
void launch_linear_quantized(const LinearQuantizedParams& params, const LinearQuantizedPlan& plan,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
