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
constexpr int64_t kTiledK = 64;            // of tiles: per stage
constexpr int64_t kMaxQuantizedRows = 64;  // of x by passes: then a weight in memory is faster

struct LinearQuantizedPlan {
  bool fused;  // codes become operands in registers; else the weight is written in x's dtype first
  bool tiled;  // by wgmma
  bool gradient;   // dx = dy W: the columns are W's k, and the sums are over its features
  int tiles;       // of 8 tokens per pass
  int64_t passes;  // over the codes: one after another, or CTAs of their own if `tiled`
  int blocks;      // of 16 features (or k of dx) per CTA
  int ranks;       // CTAs that share the sum: a cluster
  int rounds;      // `tiled`: whole tiles per CTA
  bool shared;     // `tiled`: the CTAs share the units of the tiles that follow
  int depth;       // stages of the ring of each warp, or of the CTA
  int early;       // stages of codes that `ahead` copies before the previous kernel ends
  int64_t ctas;
  int64_t workspace_bytes;  // `shared`: flags, then a partial sum per CTA; aligned to 16 bytes
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

// ---- tiles ----

// A tile is 64 columns of the result per warpgroup by a number of tokens: 256 columns by 32, 64 or
// 128 tokens, or 128 columns by 256. A stage of the ring is a unit: 64 along the sum.
constexpr int kTiledTokens[] = {32, 64, 128, 256};
constexpr int tiled_groups(int tokens) { return tokens == 256 ? 2 : 4; }
// The kernel of 128 tokens has no registers left for parts of tiles, except a cluster's.
constexpr bool tiled_may_share(int tokens) { return tokens != 128; }
constexpr int kTiledFlagBytes = 4096;  // of the workspace: a flag per CTA and warpgroup
// With more rows the product pays for a weight in memory.
constexpr int64_t max_tiled_rows(int bits) { return bits == 4 ? 2048 : 1024; }

// Of 16 features and 64 k.
constexpr int64_t tiled_block_bytes(int bits) {
  return kFragmentBytes * kTiledK / fragment_k(bits);
}

// Rows of scales that a stage has. y: of its 64 k; int8's scale multiplies the sums. dx: of the
// tile's k.
inline int tiled_scale_rows(const QuantizedWeight& w, bool gradient, int columns) {
  if (!gradient) return w.bits == 8 ? 0 : scale_rows_per_stage(w);
  if (w.group == w.features || w.group % columns == 0) return 1;
  return columns % w.group == 0 ? columns / static_cast<int>(w.group) : 2;
}

// Shared memory of a CTA. A stage of the ring is the tokens and the codes of a unit, and its part
// of a second ring of scales and zeros. The sums that a cluster exchanges replace both at the end.
struct TiledMemory {
  int codes, bytes;                      // of a stage: where the codes begin, and its size
  int zeros, scale_bytes, scale_stride;  // of its scales: where zeros begin, size, distance
  int scales, output, barriers, size;    // of the CTA; `output` is the rounded tile
};

inline TiledMemory tiled_memory(const QuantizedWeight& w, const LinearQuantizedPlan& plan) {
  const int tokens = plan.tiles * 8, columns = plan.blocks * 16;
  const int features = plan.gradient ? static_cast<int>(kTiledK) : columns;
  const int scales = tiled_scale_rows(w, plan.gradient, columns) * features;
  TiledMemory m{};
  m.codes = tokens * 128;
  m.bytes = m.codes + plan.blocks * static_cast<int>(tiled_block_bytes(w.bits));
  m.zeros = scales * 2;
  m.scale_bytes = m.zeros + (w.zeros != nullptr ? scales : 0);
  m.scale_stride = ceil_div(m.scale_bytes, 128) * 128;
  m.scales = plan.depth * m.bytes;
  const int sums = plan.ranks > 1 ? columns * tokens * 4 : 0;
  m.output = ceil_div(std::max(m.scales + plan.depth * m.scale_stride, sums), 1024) * 1024;
  m.barriers = m.output + columns * tokens * 2;
  m.size = m.barriers + kMaxQuantizedDepth * 16;
  return m;
}

// Null if the kernels of tiles can take a call that the kernel of few rows can, else why not.
inline const char* why_not_tiled(const LinearQuantizedParams& p, bool gradient) {
  if (!p.sm90) return "wgmma and clusters are an H100's";
  if (p.rows > max_tiled_rows(p.weight.bits)) {
    return p.weight.bits == 4 ? "more than 2048 rows: a code would become an operand too often"
                              : "more than 1024 rows: a code would become an operand too often";
  }
  if (p.weight.features % kTiledK != 0) return "the features are no multiple of 64";
  if (p.weight.features == 0 || p.weight.outputs == 0) return "the weight is empty";
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

// The cycles of the CTA that has the most to do (measured: docs/kernels/linear_quantized.md).
struct TiledCost {
  int64_t unit, tiles, units;  // cycles of a unit; of the product; of a tile
  int64_t columns_by_tokens;   // of a tile

  TiledCost(const LinearQuantizedParams& p, const LinearQuantizedPlan& plan) {
    const QuantizedWeight& w = p.weight;
    const int64_t tokens = plan.tiles * 8, groups = plan.blocks / 4;
    // wgmma takes two cycles per token. A conversion takes the longer, the more wgmma runs.
    const int64_t conversion = w.bits == 4 ? 168 : plan.gradient ? 233 : 220;
    unit = groups * std::max(tokens * 2 + 4, conversion + tokens * 5 / 4);
    units = ceil_div(plan.gradient ? w.outputs : w.features, kTiledK);
    tiles = ceil_div(plan.gradient ? w.features : w.outputs, groups * 64) * plan.passes;
    columns_by_tokens = groups * 64 * tokens;
  }
  // `rounds` tiles, one after another.
  int64_t whole(int64_t rounds) const { return kStart + rounds * (units * unit + kStore); }
  int64_t cluster(int64_t ranks) const {
    return kStart + ceil_div(units, ranks) * unit + kStore + columns_by_tokens * 15 / 64;
  }
  // The rest after `rounds` tiles is shared by `ctas`.
  int64_t shared(int64_t rounds, int64_t ctas) const {
    const int64_t rest = ceil_div((tiles - rounds * ctas) * units, ctas);
    return whole(rounds) + rest * unit + 8000 + columns_by_tokens / 2;
  }

 private:
  // The launch and the first stage's way; the sums' way through shared memory.
  static constexpr int64_t kStart = 4000, kStore = 2000;
};

// How the CTAs share `plan`'s tiles, and its cycles.
inline int64_t share_tiles(const LinearQuantizedParams& p, const DeviceInfo& device,
                           LinearQuantizedPlan& plan) {
  const TiledCost cost(p, plan);
  const int64_t sms = device.num_sms;
  plan.rounds = static_cast<int>(ceil_div(cost.tiles, sms));
  plan.ctas = std::min(cost.tiles, sms);
  plan.ranks = 1;
  int64_t least = cost.whole(plan.rounds);
  for (int ranks : {2, 3, 4, 5, 6, 8}) {
    if (cost.tiles > resident_tiles(ranks, device) || ranks > cost.units) continue;
    if (cost.cluster(ranks) >= least) continue;
    least = cost.cluster(ranks);
    plan.ranks = ranks;
    plan.rounds = 0;
    plan.ctas = cost.tiles * ranks;
  }
  // At least one round of tiles is shared, so that the parts of few CTAs make a tile. The CTAs are
  // not in step along the sum then: L2 must hold the tokens.
  const int64_t rounds = std::max<int64_t>(cost.tiles / sms - 1, 0);
  const bool fits_l2 = p.rows * cost.units * kTiledK * 2 <= device.l2_bytes;
  const bool flags_fit = sms * tiled_groups(plan.tiles * 8) * 4 <= kTiledFlagBytes;
  if (fits_l2 && flags_fit && tiled_may_share(plan.tiles * 8) && cost.tiles % sms != 0 &&
      cost.tiles * cost.units >= sms && cost.shared(rounds, sms) < least) {
    least = cost.shared(rounds, sms);
    plan.shared = true;
    plan.ranks = 1;
    plan.rounds = static_cast<int>(rounds);
    plan.ctas = sms;
    plan.workspace_bytes = kTiledFlagBytes + sms * cost.columns_by_tokens * 4;
  }
  return least;
}

inline LinearQuantizedPlan choose_tiles(const LinearQuantizedParams& p, const DeviceInfo& device,
                                        bool gradient) {
  LinearQuantizedPlan best{};
  int64_t least = 0;
  for (const int tokens : kTiledTokens) {
    LinearQuantizedPlan plan{.fused = true, .tiled = true, .gradient = gradient};
    plan.tiles = tokens / 8;
    plan.passes = ceil_div(p.rows, int64_t{tokens});
    plan.blocks = tiled_groups(tokens) * 4;
    const int64_t cycles = share_tiles(p, device, plan);
    if (best.fused && cycles >= least) continue;
    least = cycles;
    best = plan;
  }
  best.depth = kMaxQuantizedDepth;
  while (best.depth > 2 && tiled_memory(p.weight, best).size > device.smem_per_block) --best.depth;
  best.reason = best.passes == 1 ? "each code is read once and becomes wgmma's operand in registers"
                                 : "codes become wgmma's operand in registers";
  return best;
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
           (plan.rounds <= 1 ? "" : ", whole tiles per CTA: " + std::to_string(plan.rounds)) +
           (plan.shared
                ? ", the rest shared, workspace " + std::to_string(plan.workspace_bytes) + " bytes"
                : "") +
           (plan.passes == 1 ? "" : ", tiles of tokens: " + std::to_string(plan.passes)) + " (" +
           plan.reason + ")";
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
