// What an attention call computes from: operands, mask, window and dropout. attention.h has the
// formulas, the choice and the launches.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ceil_div.h"
#include "common/dtype.h"

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
  // On CUDA: 2 or 3 statistics of each row, accumulator type. The launch points it into the
  // workspace.
  void* row_stats = nullptr;
  AttentionOperand dq;  // (B, H, S_q, D), null if not wanted
  AttentionOperand dk;  // (B, H_kv, S_k, D), null if not wanted
  AttentionOperand dv;  // (B, H_kv, S_k, D_v), null if not wanted
  // Null if not wanted. Of the mask's type if rounds_mask_gradient(), else accumulator type.
  void* dmask = nullptr;
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

}  // namespace warpwright
