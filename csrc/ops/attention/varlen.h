// Attention of packed sequences: sequence n has queries cu_q[n] to cu_q[n + 1] - 1 of (total_q, H,
// D) and keys cu_k[n] to cu_k[n + 1] - 1. Causal rule and window count from the last query and the
// last key: query i of a sequence is at position i + S_k - S_q. The kernels are those of
// attention.h, each tile within one sequence.
#pragma once

#include <algorithm>

#include "common/error_record.h"
#include "ops/attention/attention.h"

namespace warpwright {

struct PackedSequences {
  const int32_t *cu_q, *cu_k;  // (count + 1), ascending; on the device of the operands
  int64_t count;
  int64_t max_q, max_k;  // no sequence is longer
};

// `fwd` has B = 1, and S_q and S_k count the rows of all sequences. Its window and is_causal are
// those of the call. lse is (H, total_q).
struct VarlenParams {
  AttentionParams fwd;
  PackedSequences sequences;
};
struct VarlenBackwardParams {
  AttentionBackwardParams bwd;  // contiguous dq, dk and dv
  PackedSequences sequences;
  const void* dlse;  // (H, total_q), AttentionLse: the gradient of lse, or null
};

// As set_window(), where positions count from the ends. Within a sequence a query lies at
// most S_k - 1 positions after a key, or S_q - 1 before it.
inline void set_packed_window(AttentionParams& p, int64_t left, int64_t right) {
  p.window_left = left >= p.S_k - 1 ? kUnlimited : between(left, -kUnlimited, kUnlimited);
  p.window_right = right >= p.S_q - 1 || (p.is_causal && right > 0)
                       ? kUnlimited
                       : between(right, -kUnlimited, kUnlimited);
  if (p.window_right != 0) return;
  p.is_causal = true;
  p.window_right = kUnlimited;
}

// One sequence of `p` as a call of its own, by the rule of attention.h: its rows and its window.
// Operands keep their strides. The caller moves the log-sum-exp and the statistics.
constexpr AttentionOperand rows_from(const AttentionOperand& x, int64_t row, int64_t element) {
  AttentionOperand moved = x;
  if (x.data != nullptr) moved.data = static_cast<char*>(x.data) + row * x.stride_s * element;
  return moved;
}
constexpr AttentionParams sequence_params(const AttentionParams& p, int64_t q_begin, int64_t q_end,
                                          int64_t k_begin, int64_t k_end) {
  AttentionParams one = p;
  const int64_t element = dtype_size(p.dtype), shift = (k_end - k_begin) - (q_end - q_begin);
  one.S_q = q_end - q_begin;
  one.S_k = k_end - k_begin;
  one.q = rows_from(p.q, q_begin, element);
  one.k = rows_from(p.k, k_begin, element);
  one.v = rows_from(p.v, k_begin, element);
  one.out = rows_from(p.out, q_begin, element);
  const int64_t right = last_seen(p);
  one.is_causal = false;
  one.window_left = p.window_left == kUnlimited ? kUnlimited : p.window_left - shift;
  one.window_right = right == kUnlimited ? kUnlimited : right + shift;
  return one;
}

// ---- the plan ----

// Rows of queries, or of keys, as one list of tiles of all sequences. Lengths are on the device, so
// the host knows only the most tiles that there can be.
struct SequenceListPlan {
  int tile_rows = 0;      // 0: no list
  int sections = 1;       // of heads
  int section = 1;        // heads per section
  int64_t max_tiles = 0;  // per head of a section
  int64_t all_tiles() const { return max_tiles * section; }
};

// The fewest sections of whole groups of heads, such that a section's other operand (K and V, or Q
// and dO) fits half of L2.
inline SequenceListPlan plan_sequence_list(int64_t rows, int64_t count, int tile_rows,
                                           int64_t kv_heads, int64_t heads, int64_t head_bytes,
                                           int64_t l2_bytes) {
  int64_t sections = std::min(kv_heads, kv_heads * head_bytes / (l2_bytes / 2) + 1);
  while (kv_heads % sections != 0) ++sections;
  return {tile_rows, static_cast<int>(sections), static_cast<int>(heads / sections),
          (rows / tile_rows + count) * sections};
}

// Where things are in a call's workspace, in bytes. A list is its number of tiles, and the tiles.
struct VarlenWorkspace {
  int64_t counters, count[2], tiles[2], stats, bytes;
};

struct VarlenPlan {
  AttentionKernels kernels;
  SequenceListPlan queries, keys;  // keys: in the backward
  int64_t padded_rows = 0;         // of the statistics per head, on sm_90a
  VarlenWorkspace workspace = {};

  constexpr int64_t workspace_bytes() const { return workspace.bytes; }
};

// Rows of the statistics of each head: those of a sequence begin at a multiple of 128, and whole
// tiles of 128 fit.
constexpr int64_t packed_stats_begin(int64_t row, int64_t sequence) {
  return (row + 128 * sequence) / 128 * 128;
}

constexpr int kVarlenFmaRows(DType dtype) { return dtype == DType::kFloat64 ? 32 : 64; }

inline VarlenWorkspace varlen_workspace(const AttentionParams& p, const VarlenPlan& plan,
                                        bool backward) {
  VarlenWorkspace w{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    const int64_t begin = at;
    at += ceil_div(bytes, int64_t{128}) * 128;
    return begin;
  };
  w.counters = take(kAttentionTileCounters * 4);
  for (int i = 0; i < (backward ? 2 : 1); ++i) {
    w.count[i] = take(4);
    w.tiles[i] = take((i == 0 ? plan.queries : plan.keys).max_tiles * 32);
  }
  if (backward)
    w.stats = take(plan.kernels.path == AttentionPath::kSm90
                       ? 2 * p.H * plan.padded_rows * 4
                       : attention_row_stats_bytes(p, plan.kernels.path));
  w.bytes = at;
  return w;
}

// The plan of the forward, or with `b` of the backward. The kernels on mma.sync know no
// packed sequences.
inline VarlenPlan choose_varlen(const AttentionParams& p, const PackedSequences& sequences,
                                const AttentionBackwardParams* b, const DeviceInfo& device,
                                bool sm90) {
  using enum AttentionPath;
  VarlenPlan plan{b ? choose_attention_backward_kernels(*b, device, sm90)
                    : choose_attention_kernels(p, device, sm90)};
  AttentionKernels& c = plan.kernels;
  constexpr int64_t kMaxRows = int64_t{1} << 29, kMaxStride = int64_t{1} << 33;
  // The map has the rows' stride even if there is one row.
  auto fits = [&](const AttentionOperand& x) {
    return x.data == nullptr || (x.stride_s > 0 && x.stride_s % 8 == 0 && x.stride_s < kMaxStride &&
                                 x.stride_h < kMaxStride);
  };
  bool all_fit = fits(p.q) && fits(p.k) && fits(p.v) && fits(p.out);
  if (b) all_fit = all_fit && fits(b->dout) && fits(b->dq) && fits(b->dk) && fits(b->dv);
  if (c.path == kSm90 && (p.S_q > kMaxRows || p.S_k > kMaxRows || p.S_q == 0 || !all_fit))
    c = {kFma, 0, true, "FMA: TMA cannot address the rows"};
  if (c.path == kMma)
    c = {kFma, 0, true,
         sm90 ? "FMA: TMA cannot address the rows" : "FMA: packed sequences without sm_90a"};
  const int64_t group = p.H / p.H_kv, max_q = std::min(sequences.max_q, p.S_q),
                max_k = std::min(sequences.max_k, p.S_k), width = (p.D + p.D_v) * 2;
  int query_rows = kVarlenFmaRows(p.dtype), key_rows = query_rows;
  if (c.path == kSm90) {
    // As for batches: tiles of 192 queries read K and V less often.
    const bool tall = !b && c.head_tile == 64 && p.S_q >= 1024 * sequences.count &&
                      (c.form != AttentionForm::kWindow || p.window_left + last_seen(p) >= 512);
    query_rows = tall ? 192 : 128;
    key_rows = c.head_tile > 128 ? 64 : 128;
    plan.padded_rows = packed_stats_begin(p.S_q, sequences.count) + 128;
  }
  plan.queries = plan_sequence_list(p.S_q, sequences.count, query_rows, p.H_kv, p.H, max_k * width,
                                    device.l2_bytes);
  if (b)
    plan.keys = plan_sequence_list(p.S_k, sequences.count, key_rows, p.H_kv, p.H_kv,
                                   group * max_q * width, device.l2_bytes);
  plan.workspace = varlen_workspace(p, plan, b != nullptr);
  return plan;
}

inline std::string describe(const VarlenPlan& plan) {
  const bool sm90 = plan.kernels.path == AttentionPath::kSm90;
  std::string text = sm90 ? "flash attention for sm_90a, " : "portable flash attention, ";
  if (sm90)
    text += "head dimensions padded to " + std::to_string(plan.kernels.head_tile) +
            (plan.kernels.form == AttentionForm::kWindow ? ", window kernels" : ", plain kernels") +
            ", wgmma: each tile is within one sequence";
  else
    text += plan.kernels.reason;
  text += ", at most " + std::to_string(plan.queries.all_tiles()) + " tiles of " +
          std::to_string(plan.queries.tile_rows) + " queries";
  if (plan.keys.tile_rows > 0)
    text += ", " + std::to_string(plan.keys.all_tiles()) + " of " +
            std::to_string(plan.keys.tile_rows) + " keys";
  return text + ", " + std::to_string(plan.workspace_bytes()) + " bytes of workspace";
}

// Where kernels report ends that are no sequences.
struct VarlenErrors {
  ErrorRecord *queries, *keys;
};

void varlen_fwd_cpu(const VarlenParams& params);
void varlen_bwd_cpu(const VarlenBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes().
void launch_varlen(const VarlenParams& params, const VarlenPlan& plan, void* workspace,
                   const VarlenErrors& errors, cudaStream_t stream);
void launch_varlen_backward(const VarlenBackwardParams& params, const VarlenPlan& plan,
                            void* workspace, const VarlenErrors& errors, cudaStream_t stream);
#endif

}  // namespace warpwright
