// Scaled dot-product attention by the flash algorithm: out = softmax(scale * q k^T + mask) v. The
// softmax is online over tiles of keys, so no S_q x S_k matrix is ever in memory. The backward
// recomputes the probabilities from `lse` and adds in a fixed order.
//   X = scale * q k^T, S = cap(X) + mask, P = exp(S - lse), A = dropout(P), out = A v
//   dA = dout v^T, dS = P * (dropout(dA) - delta), delta = rowsum(dout * out), dX = dS * cap'(X)
//   dv = A^T dout, dq = scale * dX k, dk = scale * dX^T q, dmask = dS
// If the log-sum-exp is a result, its gradient is subtracted from delta.
// With softcap cap(x) = c * tanh(x / c) and cap'(x) = 1 - tanh(x / c)^2, else cap(x) = x.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "common/philox_source.h"
#include "ops/attention/gang_schedule.h"
#include "ops/attention/mask_gradient.h"
#include "ops/attention/mask_tiles.h"
#include "ops/attention/params.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class AttentionPath {
  kFma,   // any type and head dimension
  kMma,   // mma.sync, sm_80 and later
  kSm90,  // wgmma and TMA
};

// Kernels of kSm90 with the same features.
enum class AttentionForm : int8_t {
  kPlain,    // and with a dense mask
  kDropout,  // and with a dense mask
  kWindow,   // a window, a softcap or both
};

// Which kernels run. Packed sequences (varlen.h) choose in the same way.
struct AttentionKernels {
  AttentionPath path;
  int head_tile;    // 64, 128 or 256: D and D_v are padded to it (not kFma)
  bool has_extras;  // the instance with mask, window, dropout or, on kMma, unusual scale
  const char* reason;
  AttentionForm form = AttentionForm::kPlain;  // kSm90
};

// Number of ints on sm_90a that count the tiles CTAs have taken: one for the forward, or one for dq
// and one for dk and dv. Tiles take different times under the causal rule, with a mask and at the
// ends of a window.
constexpr int kAttentionTileCounters = 2;
inline bool needs_tile_counters(const AttentionParams& p) {
  return p.is_causal || p.mask_type != MaskType::kNone || is_windowed(p);
}

// Where the parts of a call's workspace are, in bytes. A part that the kernels do not need has 0.
struct AttentionWorkspaceLayout {
  struct Part {
    int64_t begin = 0, bytes = 0;
  };
  Part tile_counters;  // kSm90, if needs_tile_counters(): ints
  Part mask;           // kSm90 with a mask: AttentionMaskTiles
  Part row_stats;      // of the backward: attention_row_stats_bytes()
  Part dq_sums;        // of the fused backward: fp32, whole blocks of queries
  Part turns;          // of the fused backward: an int per 64 queries
  Part mask_gradient;  // of the mask's gradient in parts: fp32, whole tiles
  int64_t bytes = 0;

  constexpr Part add(int64_t part_bytes) {
    constexpr int64_t kAlignment = 256;
    const Part part{bytes, part_bytes};
    bytes += ceil_div(part_bytes, kAlignment) * kAlignment;
    return part;
  }
};

struct AttentionPlan : AttentionKernels {
  bool vectorized = false;       // kMma: 16-byte loads, else elements
  bool pair_stores = false;      // kMma: stores of two elements
  int query_rows = 0;            // kSm90, in the forward: queries per tile
  AttentionMaskTiles mask = {};  // kSm90 with a mask
  AttentionWorkspaceLayout workspace = {};

  constexpr int64_t workspace_bytes() const { return workspace.bytes; }
};

// On sm_90a with a schedule of gangs, one kernel computes all gradients.
struct AttentionBackwardPlan : AttentionPlan {
  GangSchedule gangs = {};              // width 0: dq has a kernel of its own
  MaskGradientPlan mask_gradient = {};  // kSm90, if it is wanted
};

// TMA's conditions on an operand's rows (16-bit elements): aligned to 16 bytes, and indices of an
// extent above 1 do not share elements.
inline bool fits_tensor_map(const AttentionOperand& x, int64_t B, int64_t H, int64_t S) {
  constexpr int64_t kMaxStride = int64_t{1} << 38;  // elements; 40 bits of bytes
  auto fits = [](int64_t extent, int64_t stride) {
    return extent == 1 || (stride > 0 && stride % 8 == 0 && stride < kMaxStride);
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && fits(B, x.stride_b) &&
         fits(H, x.stride_h) && fits(S, x.stride_s);
}

// Does not check the operands of the backward, whose gradients are dense.
inline AttentionKernels choose_attention_kernels(const AttentionParams& p, const DeviceInfo& device,
                                                 bool sm90) {
  using enum AttentionPath;
  using enum AttentionForm;
  const int64_t widest = p.D > p.D_v ? p.D : p.D_v;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16)
    return {kFma, 0, true, "FMA: fp32 and fp64 keep their precision"};
  if (device.sm_arch < 80) return {kFma, 0, true, "FMA: mma.sync of 16-bit types needs sm_80"};
  if (widest > 256) return {kFma, 0, true, "FMA: a head dimension above 256 fits no tile"};
  if (p.D == 0 || p.D_v == 0) return {kFma, 0, true, "FMA: an empty head dimension"};
  // The tensor-core kernels know tanh to 2^-21. It must neither be a coarse part of the scores, nor
  // follow coarsely from a row's log-sum-exp.
  if (p.softcap > 0 && (p.softcap < 1. / 64 || p.softcap > 4096))
    return {kFma, 0, true, "FMA: an unusual softcap"};
  // 2^(scale * s - scale * max) needs a positive scale: a negative one would turn the maximum into
  // the minimum.
  const float scale = static_cast<float>(p.scale);
  const bool foldable = scale > 0 && scale < 1e30f;
  const bool masked = p.mask_type != MaskType::kNone;
  const int head_tile = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  const bool dropout = p.dropout_p > 0, windowed = is_windowed(p);
  const bool extras = masked || dropout || windowed;
  if (!foldable) return {kMma, head_tile, true, "mma.sync: an unusual scale"};
  if (!sm90)
    return {
        kMma, head_tile, extras,
        extras ? "mma.sync: with mask, window, softcap or dropout" : "mma.sync: plain or causal"};
  if (windowed && (masked || dropout))
    return {kMma, head_tile, true, "mma.sync: window or softcap with mask or dropout"};
  if (dropout && head_tile > 128)
    return {kMma, head_tile, true, "mma.sync: dropout with a head dimension above 128"};
  constexpr int64_t kMaxLength = int64_t{1} << 30, kMaxTiles = int64_t{1} << 30;
  const bool aligned = p.D % 8 == 0 && p.D_v % 8 == 0 && fits_tensor_map(p.q, p.B, p.H, p.S_q) &&
                       fits_tensor_map(p.k, p.B, p.H_kv, p.S_k) &&
                       fits_tensor_map(p.v, p.B, p.H_kv, p.S_k) &&
                       fits_tensor_map(p.out, p.B, p.H, p.S_q);
  if (!aligned)
    return {kMma, head_tile, extras, "mma.sync: TMA needs rows at multiples of 16 bytes"};
  if (p.S_k == 0) return {kMma, head_tile, extras, "mma.sync: no keys"};
  // Classifying and listing take 6 us, as long as the whole portable kernel.
  if (masked && p.S_q * p.S_k <= 64 * 64)
    return {kMma, head_tile, extras, "mma.sync: a mask of few elements"};
  // Its tiles' bits would take S_q * S_k / 8 bytes.
  if (masked && p.S_k > 1 && p.mask_stride[3] == 0)
    return {kMma, head_tile, extras, "mma.sync: the mask broadcasts over the keys"};
  if (p.S_q > kMaxLength || p.S_k > kMaxLength ||
      p.B * p.H * (ceil_div(p.S_q, int64_t{64}) + ceil_div(p.S_k, int64_t{64})) > kMaxTiles)
    return {kMma, head_tile, extras, "mma.sync: tiles are counted in 32 bits"};
  if (masked)
    return {kSm90, head_tile, true,
            dropout ? "wgmma: blocks that the mask hides are skipped; dropout"
                    : "wgmma: blocks that the mask hides are skipped",
            dropout ? kDropout : kPlain};
  if (windowed)
    return {kSm90, head_tile, true, "wgmma: blocks outside the window are skipped", kWindow};
  if (dropout) return {kSm90, head_tile, true, "wgmma: dropout", kDropout};
  return {kSm90, head_tile, false, "wgmma: plain or causal", kPlain};
}

// The fused backward's blocks: as many rows as two consumer warpgroups have. Wide heads take half
// of them for queries, since their gradients take the registers.
constexpr int attention_fused_query_rows(int head_tile) { return head_tile == 128 ? 64 : 128; }
constexpr int kAttentionFusedKeyRows = 128;

inline GangLimits attention_gang_limits(int head_tile, const DeviceInfo& device) {
  return {attention_fused_query_rows(head_tile), kAttentionFusedKeyRows, device.num_sms,
          int64_t{head_tile} * 8, device.l2_bytes};
}

// Whether the fused backward is faster than a kernel for dq and one for dk and dv. On an H200 it
// takes 0.8 of their time if heads are long and fill the CTAs. Each key block costs a CTA 1.5 steps
// more than its own. Sums of dq that exceed L2 cost more than the plan saves.
inline bool fused_backward_pays(const GangSchedule& gangs, const GangLimits& limits) {
  if (gangs.width == 0 || gang_working_set(gangs, limits) > 2 * limits.l2_bytes) return false;
  const double overhead = gangs.is_causal ? 3 : 1.5;  // a round has one key block, or two
  const double rounds = double(gangs.rounds()) * ceil_div(gangs.heads, gangs.gangs);
  const double planned = (gangs.round_steps() + overhead) * rounds * limits.ctas;
  return double(gangs.head_steps()) * gangs.heads > 0.87 * planned;
}

// The kernels of the backward. The forward may have taken another path.
inline AttentionKernels choose_attention_backward_kernels(const AttentionBackwardParams& p,
                                                          const DeviceInfo& device, bool sm90) {
  AttentionKernels kernels = choose_attention_kernels(p.fwd, device, sm90);
  if (kernels.path != AttentionPath::kSm90) return kernels;
  const AttentionParams& f = p.fwd;
  auto gradient_fits = [&](const AttentionOperand& x, int64_t H, int64_t S) {
    return x.data == nullptr || fits_tensor_map(x, f.B, H, S);
  };
  const bool aligned = fits_tensor_map(p.dout, f.B, f.H, f.S_q) &&
                       gradient_fits(p.dq, f.H, f.S_q) && gradient_fits(p.dk, f.H_kv, f.S_k) &&
                       gradient_fits(p.dv, f.H_kv, f.S_k);
  if (!aligned)
    return {AttentionPath::kMma, kernels.head_tile, kernels.has_extras,
            "mma.sync: TMA needs rows at multiples of 16 bytes"};
  // One CTA cannot hold all three gradients of wide heads.
  if (kernels.head_tile > 128)
    kernels.reason =
        "wgmma: a kernel for dq; in that of dk and dv each warpgroup holds one of them";
  return kernels;
}

// Whether the kernel of the mask's gradient rounds it to the mask's type, and writes all of it.
inline bool rounds_mask_gradient(const AttentionBackwardParams& p, const DeviceInfo& device,
                                 bool sm90) {
  return choose_attention_backward_kernels(p, device, sm90).path == AttentionPath::kSm90;
}

// Rows per head of the statistics on sm_90a, whole blocks of the kernels' 64 or 128 queries.
inline int64_t attention_padded_rows(const AttentionParams& p) {
  return ceil_div(p.S_q, int64_t{128}) * 128;
}

// Bytes that the backward's statistics take on `path`: lse and delta, padded on sm_90a; float32
// adds the rounding error of lse.
inline int64_t attention_row_stats_bytes(const AttentionParams& p, AttentionPath path) {
  if (path == AttentionPath::kSm90) return 2 * p.B * p.H * attention_padded_rows(p) * 4;
  const int64_t rows = p.B * p.H * p.S_q;
  if (p.dtype == DType::kFloat64) return 2 * rows * 8;
  return (p.dtype == DType::kFloat32 ? 3 : 2) * rows * 4;
}

inline bool rows_aligned(const AttentionOperand& x, int64_t bytes, int64_t size) {
  const auto strides = x.stride_b | x.stride_h | x.stride_s;
  return reinterpret_cast<uintptr_t>(x.data) % bytes == 0 && strides * size % bytes == 0;
}

// What forward and backward share. `inputs` and `outputs` are the operands of kMma.
inline AttentionPlan plan_attention(const AttentionParams& p, const AttentionKernels& kernels,
                                    std::initializer_list<AttentionOperand> inputs,
                                    std::initializer_list<AttentionOperand> outputs,
                                    bool backward) {
  AttentionPlan plan{kernels};
  AttentionWorkspaceLayout& w = plan.workspace;
  if (kernels.path == AttentionPath::kMma) {
    constexpr int64_t kSize = 2;
    plan.vectorized = p.D % 8 == 0 && p.D_v % 8 == 0;
    for (const auto& x : inputs) plan.vectorized &= rows_aligned(x, 16, kSize);
    plan.pair_stores = p.D % 2 == 0 && p.D_v % 2 == 0;
    for (const auto& x : outputs) plan.pair_stores &= rows_aligned(x, 4, kSize);
  }
  if (kernels.path == AttentionPath::kSm90) {
    if (needs_tile_counters(p))
      w.tile_counters = w.add(kAttentionTileCounters * int64_t{sizeof(int)});
    if (p.mask_type != MaskType::kNone) {
      plan.mask = attention_mask_tiles(p, backward);
      w.mask = w.add(plan.mask.bytes);
    }
  }
  return plan;
}

// Queries per tile of the forward on sm_90a. Tiles of 192 read K and V less often. With few rows,
// tiles of 128 waste fewer of them.
inline int choose_query_rows(const AttentionParams& p, const AttentionKernels& kernels) {
  if (kernels.head_tile > 64 || p.S_q < 2048) return 128;
  switch (kernels.form) {
    case AttentionForm::kPlain:  // a mask's values need the registers of two consumers
      return p.mask_type == MaskType::kNone || p.mask_type == MaskType::kBool ? 192 : 128;
    case AttentionForm::kDropout:  // 192 is no faster on any shape raced
      return 128;
    case AttentionForm::kWindow:  // at its limits, taller tiles walk more hidden keys
      return p.window_left + last_seen(p) >= 512 ? 192 : 128;
  }
  return 128;
}

inline AttentionPlan choose_attention(const AttentionParams& p, const DeviceInfo& device,
                                      bool sm90) {
  AttentionPlan plan = plan_attention(p, choose_attention_kernels(p, device, sm90), {p.q, p.k, p.v},
                                      {p.out}, /*backward=*/false);
  if (plan.path == AttentionPath::kSm90) plan.query_rows = choose_query_rows(p, plan);
  return plan;
}

inline AttentionBackwardPlan choose_attention_backward(const AttentionBackwardParams& p,
                                                       const DeviceInfo& device, bool sm90) {
  const AttentionParams& f = p.fwd;
  AttentionBackwardPlan plan{plan_attention(f, choose_attention_backward_kernels(p, device, sm90),
                                            {f.q, f.k, f.v, p.dout}, {p.dq, p.dk, p.dv},
                                            /*backward=*/true)};
  AttentionWorkspaceLayout& w = plan.workspace;
  w.row_stats = w.add(attention_row_stats_bytes(f, plan.path));
  if (plan.path == AttentionPath::kSm90 && p.dmask != nullptr) {
    plan.mask_gradient = plan_mask_gradient(f, device.num_sms);
    w.mask_gradient = w.add(plan.mask_gradient.workspace_bytes());
  }
  // Alone, each of the kernels for some gradients multiplies less.
  const bool all_kinds = p.dq.data != nullptr && (p.dk.data != nullptr || p.dv.data != nullptr);
  if (plan.path != AttentionPath::kSm90 || plan.head_tile > 128 || plan.has_extras || !all_kinds)
    return plan;
  const GangLimits limits = attention_gang_limits(plan.head_tile, device);
  const GangSchedule gangs =
      make_gang_schedule(f.B * f.H_kv, f.H / f.H_kv, f.S_q, f.S_k, f.is_causal, limits);
  if (!fused_backward_pays(gangs, limits)) return plan;
  plan.gangs = gangs;
  plan.reason = "wgmma: all gradients in one kernel";
  const int64_t rows = f.B * f.H * attention_padded_rows(f);
  w.dq_sums = w.add(rows * plan.head_tile * 4);
  w.turns = w.add(rows / 64 * 4);
  return plan;
}

inline std::string describe(const AttentionKernels& kernels) {
  std::string text = kernels.path == AttentionPath::kSm90 ? "flash attention for sm_90a, "
                                                          : "portable flash attention, ";
  if (kernels.path != AttentionPath::kFma)
    text += "head dimensions padded to " + std::to_string(kernels.head_tile) + ", ";
  if (kernels.path == AttentionPath::kSm90)
    text += kernels.form == AttentionForm::kPlain     ? "plain kernels, "
            : kernels.form == AttentionForm::kDropout ? "dropout kernels, "
                                                      : "window kernels, ";
  return text + kernels.reason;
}
// How the kernels work: accesses, tiles, workspace.
inline std::string describe_work(const AttentionPlan& plan) {
  std::string text;
  if (plan.path == AttentionPath::kMma) {
    text += plan.vectorized ? ", 16-byte loads" : ", loads of one element";
    text += plan.pair_stores ? ", stores of two elements" : ", stores of one element";
  }
  if (plan.query_rows > 0) text += ", tiles of " + std::to_string(plan.query_rows) + " queries";
  if (plan.workspace_bytes() > 0)
    text += ", " + std::to_string(plan.workspace_bytes()) + " bytes of workspace";
  return text;
}
inline std::string describe(const AttentionPlan& plan) {
  return describe(static_cast<const AttentionKernels&>(plan)) + describe_work(plan);
}
inline std::string describe(const AttentionBackwardPlan& plan) {
  std::string text = describe(static_cast<const AttentionKernels&>(plan));
  if (plan.gangs.width > 0)
    text += ", " + std::to_string(plan.gangs.gangs) + " gangs of " +
            std::to_string(plan.gangs.width) + " CTAs add to dq in planned turns";
  return text + describe(plan.mask_gradient) + describe_work(plan);
}
// The parts of the fused backward.
inline std::string describe(const AttentionWorkspaceLayout& workspace) {
  return std::to_string(workspace.dq_sums.bytes) + " bytes for sums of dq, " +
         std::to_string(workspace.turns.bytes) + " for turns, " +
         std::to_string(workspace.row_stats.bytes) + " for statistics of the rows";
}

void attention_fwd_cpu(const AttentionParams& params);
// dlse: the gradient of lse (B, H, S_q), AttentionLse, or null. It is subtracted from delta.
void attention_bwd_cpu(const AttentionBackwardParams& params, const void* dlse = nullptr);
void attention_dropout_cpu(const AttentionDropoutParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// Writes seed and offset to `philox_state` (2).
void launch_philox_state(const PhiloxSource& source, int64_t* philox_state, cudaStream_t stream);
// `workspace`: plan.workspace_bytes().
void launch_attention(const AttentionParams& params, const AttentionPlan& plan, void* workspace,
                      cudaStream_t stream);
// dlse: as for attention_bwd_cpu().
void launch_attention_backward(const AttentionBackwardParams& params, const void* dlse,
                               const AttentionBackwardPlan& plan, void* workspace,
                               cudaStream_t stream);
void launch_attention_dropout(const AttentionDropoutParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
