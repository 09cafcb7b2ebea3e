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

struct LinearQuantizedParams {
  QuantizedWeight weight;
  DType dtype;  // of x, bias and y
  int64_t rows;
  const void* input;
  int64_t input_pitch;  // elements from a row to the next; the columns are adjacent
  const void* bias;     // (N) or null
  void* output;         // (M, N), dense
  bool sm90;            // clusters: sm90_path_available()
  // No pending kernel writes the weight: its loads may pass the end of the previous one.
  bool ahead;
};

// ---- choice ----

constexpr int kQuantizedWarps = 8;
constexpr int kMaxQuantizedBlocks = 4;  // blocks of 16 features per CTA: the sums are in registers
constexpr int kMaxQuantizedRanks = 2;   // CTAs of a cluster, which share k
constexpr int kMaxQuantizedDepth = 8;   // stages of a warp's ring
constexpr int kQuantizedCtasPerSm = 2;
constexpr int64_t kFewQuantizedRows = 16;  // of x in one pass
constexpr int64_t kMaxQuantizedRows = 64;  // of x by passes: then a weight in memory is faster
constexpr int64_t kMaxTiledRows = 512;     // of x by tiles
constexpr int kTiledColumns = 256;         // of the result per CTA
constexpr int kTiledBlocks = kTiledColumns / 16;
constexpr int kTiledUnits = kTiledColumns / 64;
constexpr int64_t kTiledK = 64;  // per stage
// Floats per token in shared memory: lanes on different banks.
constexpr int kTiledPitch = kTiledColumns + 4;

struct LinearQuantizedPlan {
  bool fused;  // codes become operands in registers; else the weight is written in x's dtype first
  bool tiled;  // by wgmma
  bool gradient;   // dx = dy W: the columns are W's k, and the sums are over its features
  int tiles;       // of 8 tokens per pass
  int64_t passes;  // over the codes: one after another, or CTAs of their own if `tiled`
  int blocks;      // of 16 features per CTA
  int ranks;       // CTAs that share k: a cluster
  int depth;       // stages of the ring of each warp, or of the CTA
  int early;       // stages of codes that `ahead` copies before the previous kernel ends
  int64_t ctas;
  int64_t workspace_bytes;  // tokens in the order of stages, aligned to 16 bytes
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

// ---- tiles ----

// A unit: 16 features by 64 k.
constexpr int64_t tiled_block_bytes(int bits) {
  return kFragmentBytes * kTiledK / fragment_k(bits);
}

// Rows of scales that a stage has. y: of its 64 k; int8's scale multiplies the sums. dx: of the
// tile's 256 k.
inline int tiled_scale_rows(const QuantizedWeight& w, bool gradient) {
  if (!gradient) return w.bits == 8 ? 0 : scale_rows_per_stage(w);
  if (w.group == w.features || w.group % kTiledColumns == 0) return 1;
  return kTiledColumns % w.group == 0 ? kTiledColumns / static_cast<int>(w.group) : 2;
}

// One stage of a CTA: tokens, codes of a unit per 16 columns, their scales and zeros. The ring's
// memory takes the sums at the end; the barriers follow.
struct TiledStage {
  int64_t codes, scales, zeros, end, bytes;  // offsets, and the size
  int64_t barriers;
};

inline TiledStage tiled_stage(const QuantizedWeight& w, const LinearQuantizedPlan& plan) {
  const int64_t features = plan.gradient ? kTiledK : kTiledColumns;
  const int64_t scales = tiled_scale_rows(w, plan.gradient) * features;
  TiledStage stage{};
  stage.codes = int64_t{plan.tiles} * 8 * 128;
  stage.scales = stage.codes + kTiledBlocks * tiled_block_bytes(w.bits);
  stage.zeros = stage.scales + scales * 2;
  stage.end = stage.zeros + (w.zeros != nullptr ? scales : 0);
  stage.bytes = ceil_div(stage.end, int64_t{1024}) * 1024;  // a pattern of the swizzle
  const int64_t sums = int64_t{plan.tiles} * 8 * kTiledPitch * 4;
  stage.barriers = std::max(plan.depth * stage.bytes, sums);
  return stage;
}

// More than half of an SM's: two CTAs of a cluster on one SM would leave another SM idle.
inline int64_t tiled_smem_bytes(const QuantizedWeight& w, const LinearQuantizedPlan& plan) {
  constexpr int64_t kHalf = 115 << 10;
  return std::max(kHalf, tiled_stage(w, plan).barriers + kMaxQuantizedDepth * 16);
}

// Null if the kernels of tiles can take a call that the kernel of few rows can, else why not.
inline const char* why_not_tiled(const LinearQuantizedParams& p, bool gradient) {
  if (!p.sm90) return "wgmma and clusters are an H100's";
  if (p.rows > kMaxTiledRows) return "more than 512 rows: a code would become an operand too often";
  if (p.weight.features % kTiledK != 0) return "the features are no multiple of 64";
  if ((gradient || p.weight.bits == 4) && p.weight.scale_dtype != p.dtype) {
    return "scales of another type would be rounded twice";
  }
  return nullptr;
}

// About so many clusters are resident, one CTA per SM. Where two clusters of 8 fit, three of 5 do,
// and where four of 4 fit, five of 3. Of the SMs that clusters of 8 leave, half complete one of 6.
inline int64_t resident_tiles(int ranks, const DeviceInfo& device) {
  const int64_t of_8 = device.clusters[3];
  switch (ranks) {
    case 3:
      return int64_t{device.clusters[2]} * 5 / 4;
    case 5:
      return of_8 * 3 / 2;
    case 6:
      return of_8 + (device.num_sms - 8 * of_8) / 12;
    case 8:
      return of_8;
    default:
      return device.clusters[ranks / 2];
  }
}

// Cycles of a unit of 64 along the sum: of its products, of the bytes that it takes from L2, and of
// the conversion (measured: docs/kernels/linear_quantized.md).
inline int64_t tiled_unit_cycles(const QuantizedWeight& w, const LinearQuantizedPlan& plan) {
  constexpr int64_t kBytesPerCycle = 24;
  const int64_t products = int64_t{plan.tiles} * 8 * 8;
  const int64_t conversion = w.bits == 4 ? (plan.gradient ? 740 : 650) : plan.gradient ? 1030 : 500;
  return std::max({products, conversion, tiled_stage(w, plan).end / kBytesPerCycle});
}

// How clusters share the sum, by the cycles of a CTA. `fixed`: the first stage's way, and the sums'
// way through shared memory.
inline void share_tiles(const LinearQuantizedParams& p, const DeviceInfo& device,
                        LinearQuantizedPlan& plan) {
  const int64_t fixed = 12000 + int64_t{plan.tiles} * 320;
  const int64_t columns = plan.gradient ? p.weight.features : p.weight.outputs;
  const int64_t units = ceil_div(plan.gradient ? p.weight.outputs : p.weight.features, kTiledK);
  const int64_t tiles = ceil_div(columns, int64_t{kTiledColumns}) * plan.passes;
  const int64_t unit = tiled_unit_cycles(p.weight, plan);
  int64_t least = 0;
  for (int ranks : {1, 2, 3, 4, 5, 6, 8}) {
    const int64_t resident = std::max<int64_t>(resident_tiles(ranks, device), 1);
    const int64_t cost =
        ceil_div(tiles, resident) * (ceil_div(units, int64_t{ranks}) * unit + fixed);
    if (plan.ranks != 0 && cost >= least) continue;
    least = cost;
    plan.ranks = ranks;
    plan.ctas = tiles * ranks;
  }
  plan.workspace_bytes = plan.passes * units * plan.tiles * 8 * 128;
}

inline LinearQuantizedPlan choose_tiles(const LinearQuantizedParams& p, const DeviceInfo& device,
                                        bool gradient) {
  LinearQuantizedPlan plan{.fused = true, .tiled = true, .gradient = gradient};
  plan.tiles = p.rows <= 32 ? 4 : p.rows <= 64 ? 8 : 16;
  plan.passes = ceil_div(p.rows, int64_t{plan.tiles} * 8);
  plan.blocks = kTiledBlocks;
  share_tiles(p, device, plan);
  const int64_t fitting =
      (device.smem_per_block - kMaxQuantizedDepth * 16) / tiled_stage(p.weight, plan).bytes;
  plan.depth = static_cast<int>(std::clamp<int64_t>(fitting, 2, kMaxQuantizedDepth));
  plan.reason = plan.passes == 1 ? "each code is read once and becomes wgmma's operand in registers"
                                 : "codes become wgmma's operand in registers";
  return plan;
}

// Null if the kernels that read codes as operands can take the call, else the reason why not.
inline const char* why_not_fused(const LinearQuantizedParams& p, const DeviceInfo& device) {
  const QuantizedWeight& w = p.weight;
  if (!w.fragments) return "the codes are in their plain order";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "x is no 16-bit type";
  if (device.sm_arch < 80) return "no mma.sync of 16-bit types";
  // In units of 64 k: launch.cuh's group_divisor().
  if (w.features / kTiledK * (w.group / kTiledK) >= int64_t{1} << 32) {
    return "so many features that the index of a group would be rounded";
  }
  auto is_aligned = [](const void* data, int64_t pitch) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(pitch)) % 16 == 0;
  };
  if (!is_aligned(p.input, p.input_pitch * 2)) {
    return "the rows of x or dy do not begin at multiples of 16 bytes";
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
  if (p.rows > kFewQuantizedRows) {
    const char* why = why_not_tiled(p, false);
    if (why == nullptr) return choose_tiles(p, device, false);
    if (p.rows > kMaxQuantizedRows) return {.fused = false, .reason = why};
  }
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

// dx = dy W: `input` is dy (M, N), `output` dx (M, K), and there is no bias.
inline LinearQuantizedPlan choose_linear_quantized_backward(const LinearQuantizedParams& p,
                                                            const DeviceInfo& device) {
  const char* why = why_not_fused(p, device);
  if (why == nullptr) why = why_not_tiled(p, true);
  if (why == nullptr && p.weight.bits == 8 &&
      (p.weight.scale_strides[0] != 1 || reinterpret_cast<uintptr_t>(p.weight.scales) % 16 != 0)) {
    why = "scales of neighbouring features are not adjacent, or do not begin at 16 bytes";
  }
  if (why != nullptr) return {.fused = false, .gradient = true, .reason = why};
  return choose_tiles(p, device, true);
}

inline std::string describe(const LinearQuantizedPlan& plan) {
  if (!plan.fused) {
    return std::string("the weight in x's dtype by a kernel, then linear (") + plan.reason + ")";
  }
  const std::string tile = "mma of " + std::to_string(plan.blocks * kFragmentFeatures) +
                           (plan.gradient ? " k by " : " features by ") +
                           std::to_string(plan.tiles * 8) + " tokens, ";
  if (plan.tiled) {
    return "wg" + tile + std::to_string(plan.depth) +
           " stages, CTAs: " + std::to_string(plan.ctas) +
           (plan.ranks == 1 ? "" : " in clusters of " + std::to_string(plan.ranks)) +
           (plan.passes == 1 ? "" : ", tiles of tokens: " + std::to_string(plan.passes)) +
           ", workspace " + std::to_string(plan.workspace_bytes) + " bytes (" + plan.reason + ")";
  }
  return tile + std::to_string(kQuantizedWarps * plan.ranks) +
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
// A plan with `fused`. `workspace`: plan.workspace_bytes.
void launch_linear_quantized(const LinearQuantizedParams& params, const LinearQuantizedPlan& plan,
                             void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
