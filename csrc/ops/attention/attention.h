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
#include <string>
#include <type_traits>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "common/philox_source.h"
#include "ops/attention/gang_schedule.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// A (B, H, S, D) operand: element (b, h, s, d) is at b * stride_b + h * stride_h + s * stride_s +
// d.
struct AttentionOperand {
  void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;
};

// The type of the rows' log-sum-exp. In the backward all probabilities of a row share its rounding
// error. A float32 value would cost float32 data a digit; it costs 16-bit data nothing.
template <class T>
using AttentionLse = std::conditional_t<sizeof(T) == 2, float, double>;

enum class MaskType : int8_t {
  kNone,
  kBool,     // false = -inf
  kFloat32,  // added to S
  kElement,  // added to S; the type of query
};

// A side of the window that has no limit; past every position.
constexpr int64_t kUnlimited = int64_t{1} << 60;

struct AttentionParams {
  DType dtype;
  int64_t B, H, H_kv;  // H is a multiple of H_kv; head h uses head h / (H / H_kv) of k and v
  int64_t S_q, S_k, D, D_v;
  double scale;
  bool is_causal;  // key j is visible to query i if j <= i (aligned at the top left)
  // Query i sees keys i - window_left to i + window_right. Both may be negative.
  int64_t window_left = kUnlimited, window_right = kUnlimited;
  double softcap = 0;  // 0: none

  AttentionOperand q;  // (B, H, S_q, D)
  AttentionOperand k;  // (B, H_kv, S_k, D)
  AttentionOperand v;  // (B, H_kv, S_k, D_v)

  MaskType mask_type = MaskType::kNone;
  const void* mask = nullptr;
  int64_t mask_stride[4] = {0, 0, 0, 0};  // over (B, H, S_q, S_k); 0 if the mask broadcasts
  bool mask_full[4] = {};                 // which of the four extents the mask has (only for dmask)

  double dropout_p = 0;
  const int64_t* philox_state = nullptr;  // (2): seed, offset; null without dropout

  AttentionOperand out;  // (B, H, S_q, D_v)
  void* lse = nullptr;   // (B, H, S_q), natural log, AttentionLse; -inf for a masked-out row
};

// How far past its own position a query sees.
constexpr int64_t last_seen(const AttentionParams& p) {
  return p.is_causal && p.window_right > 0 ? 0 : p.window_right;
}
// std::clamp takes references, which nvcc keeps in local memory.
constexpr int64_t between(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

struct PositionRange {
  int64_t begin, end;
};
// The keys that queries [row, row_end) see.
constexpr PositionRange visible_keys(const AttentionParams& p, int64_t row, int64_t row_end) {
  const int64_t end = between(row_end + last_seen(p), 0, p.S_k);
  return {between(row - p.window_left, 0, end), end};
}
// The queries that see keys [col, col_end).
constexpr PositionRange visible_queries(const AttentionParams& p, int64_t col, int64_t col_end) {
  const int64_t end = between(col_end + p.window_left, 0, p.S_q);
  return {between(col - last_seen(p), 0, end), end};
}
// Whether the call has a window beyond the causal rule, or a softcap.
constexpr bool is_windowed(const AttentionParams& p) {
  return p.window_left != kUnlimited || p.window_right != kUnlimited || p.softcap > 0;
}

// Sets the window, after the extents and is_causal. A limit that hides nothing is no limit, and a
// window that ends at the query itself is the causal rule: these have faster kernels.
inline void set_window(AttentionParams& p, int64_t left, int64_t right) {
  p.window_left = left >= p.S_q - 1 ? kUnlimited : between(left, -kUnlimited, kUnlimited);
  p.window_right = right >= p.S_k - 1 || (p.is_causal && right > 0)
                       ? kUnlimited
                       : between(right, -kUnlimited, kUnlimited);
  if (p.window_right != 0) return;
  p.is_causal = true;
  p.window_right = kUnlimited;
}

struct AttentionBackwardParams {
  AttentionParams fwd;
  AttentionOperand dout;  // (B, H, S_q, D_v)
  // On CUDA, of attention_row_stats_bytes(): 2 or 3 statistics of each row, accumulator type.
  void* row_stats = nullptr;
  AttentionOperand dq;                     // (B, H, S_q, D), null if not wanted
  AttentionOperand dk;                     // (B, H_kv, S_k, D), null if not wanted
  AttentionOperand dv;                     // (B, H_kv, S_k, D_v), null if not wanted
  void* dmask = nullptr;                   // accumulator type, null if not wanted
  int64_t dmask_stride[4] = {0, 0, 0, 0};  // 0 if the mask broadcasts: the gradient is summed there
};

// Rows [row_begin, row_begin + rows) of the dropout factors: 0 or 1 / (1 - dropout_p).
struct AttentionDropoutParams {
  DType dtype;
  int64_t B, H, rows, row_begin, S_k;
  double dropout_p;
  const int64_t* philox_state;  // (2): seed, offset
  void* factors;                // (B, H, rows, S_k)
};

enum class AttentionPath {
  kFma,   // any type and head dimension
  kMma,   // mma.sync, sm_80 and later
  kSm90,  // wgmma and TMA
};

struct AttentionConfig {
  AttentionPath path;
  int head_tile;    // 64, 128 or 256: D and D_v are padded to it (not kFma)
  bool has_extras;  // the instance with mask, window, dropout or, on kMma, unusual scale
  const char* reason;
};

// The backward's configuration. On sm_90a with a plan of gangs, one kernel computes all gradients.
struct AttentionBackwardConfig : AttentionConfig {
  GangSchedule gangs = {};  // width 0: dq has a kernel of its own
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
inline AttentionConfig choose_attention_config(const AttentionParams& p, const DeviceInfo& device,
                                               bool sm90) {
  using enum AttentionPath;
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
                    : "wgmma: blocks that the mask hides are skipped"};
  if (windowed) return {kSm90, head_tile, true, "wgmma: blocks outside the window are skipped"};
  return {kSm90, head_tile, dropout, dropout ? "wgmma: dropout" : "wgmma: plain or causal"};
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

// The configuration of the backward. The forward may have taken another path.
inline AttentionBackwardConfig choose_attention_backward_config(const AttentionBackwardParams& p,
                                                                const DeviceInfo& device,
                                                                bool sm90) {
  AttentionBackwardConfig config{choose_attention_config(p.fwd, device, sm90)};
  if (config.path != AttentionPath::kSm90) return config;
  auto portable = [&](const char* reason) -> AttentionBackwardConfig {
    return {{AttentionPath::kMma, config.head_tile, config.has_extras, reason}};
  };
  const AttentionParams& f = p.fwd;
  auto gradient_fits = [&](const AttentionOperand& x, int64_t H, int64_t S) {
    return x.data == nullptr || fits_tensor_map(x, f.B, H, S);
  };
  const bool aligned = fits_tensor_map(p.dout, f.B, f.H, f.S_q) &&
                       gradient_fits(p.dq, f.H, f.S_q) && gradient_fits(p.dk, f.H_kv, f.S_k) &&
                       gradient_fits(p.dv, f.H_kv, f.S_k);
  if (!aligned) return portable("mma.sync: TMA needs rows at multiples of 16 bytes");
  // One CTA cannot hold all three gradients of wide heads.
  if (config.head_tile > 128) {
    config.reason = "wgmma: a kernel for dq; in that of dk and dv each warpgroup holds one of them";
    return config;
  }
  // Alone, each of the kernels for some gradients multiplies less.
  const bool all_kinds = p.dq.data != nullptr && (p.dk.data != nullptr || p.dv.data != nullptr);
  if (config.has_extras || !all_kinds) return config;
  const GangLimits limits = attention_gang_limits(config.head_tile, device);
  const GangSchedule gangs =
      make_gang_schedule(f.B * f.H_kv, f.H / f.H_kv, f.S_q, f.S_k, f.is_causal, limits);
  if (!fused_backward_pays(gangs, limits)) return config;
  config.gangs = gangs;
  config.reason = "wgmma: all gradients in one kernel";
  return config;
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

// The fused backward's workspace: fp32 sums of dq in whole blocks, then the turns, one per 64
// queries.
struct AttentionFusedWorkspace {
  int64_t sums_bytes, turns_bytes;
  int64_t bytes() const { return sums_bytes + turns_bytes; }
};
inline AttentionFusedWorkspace attention_fused_workspace(const AttentionParams& p, int head_tile) {
  const int64_t rows = p.B * p.H * attention_padded_rows(p);
  return {rows * head_tile * 4, rows / 64 * 4};
}

// Number of ints on sm_90a that count the tiles CTAs have taken: one for the forward, or one for dq
// and one for dk and dv. Tiles take different times under the causal rule, with a mask and at the
// ends of a window.
constexpr int kAttentionTileCounters = 2;
inline bool needs_tile_counters(const AttentionParams& p) {
  return p.is_causal || p.mask_type != MaskType::kNone || is_windowed(p);
}

// What the sm_90a kernels need on the device besides their operands.
struct AttentionWorkspace {
  int* tile_counters = nullptr;  // kAttentionTileCounters, if needs_tile_counters()
  void* mask = nullptr;          // AttentionMaskTiles::bytes, with a mask
  void* fused = nullptr;         // AttentionFusedWorkspace::bytes(), with a plan of gangs
  const void* dlse = nullptr;    // of the backward: the gradient of lse (B, H, S_q), AttentionLse
};

inline std::string describe(const AttentionConfig& config) {
  std::string text = config.path == AttentionPath::kSm90 ? "flash attention for sm_90a, "
                                                         : "portable flash attention, ";
  if (config.path != AttentionPath::kFma) {
    text += "head dimensions padded to " + std::to_string(config.head_tile) + ", ";
  }
  return text + config.reason;
}
inline std::string describe(const AttentionBackwardConfig& config) {
  std::string text = describe(static_cast<const AttentionConfig&>(config));
  const GangSchedule& gangs = config.gangs;
  if (gangs.width == 0) return text;
  return text + ", " + std::to_string(gangs.gangs) + " gangs of " + std::to_string(gangs.width) +
         " CTAs add to dq in planned turns";
}
inline std::string describe(const AttentionFusedWorkspace& workspace) {
  return std::to_string(workspace.sums_bytes) + " bytes for sums of dq, " +
         std::to_string(workspace.turns_bytes) + " for turns";
}

void attention_fwd_cpu(const AttentionParams& params);
// dlse: the gradient of lse (B, H, S_q), AttentionLse, or null. It is subtracted from delta.
void attention_bwd_cpu(const AttentionBackwardParams& params, const void* dlse = nullptr);
void attention_dropout_cpu(const AttentionDropoutParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// Writes seed and offset to `philox_state` (2).
void launch_philox_state(const PhiloxSource& source, int64_t* philox_state, cudaStream_t stream);
void launch_attention_fwd(const AttentionParams& params, const AttentionConfig& config,
                          const AttentionWorkspace& workspace, cudaStream_t stream);
void launch_attention_bwd(const AttentionBackwardParams& params,
                          const AttentionBackwardConfig& config,
                          const AttentionWorkspace& workspace, cudaStream_t stream);
void launch_attention_dropout(const AttentionDropoutParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
