// Scaled dot-product attention by the flash algorithm: out = softmax(scale * q k^T + mask) v with
// an online softmax over tiles of keys, so that no S_q x S_k matrix is ever in memory; forward and
// backward. The backward recomputes the probabilities from `lse` and adds in a fixed order.
//   S = scale * q k^T + mask, P = exp(S - lse), A = dropout(P), out = A v
//   dA = dout v^T, dS = P * (dropout(dA) - delta), delta = rowsum(dout * out)
//   dv = A^T dout, dq = scale * dS k, dk = scale * dS^T q, dmask = dS
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/dtype.h"

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

// The type of the rows' log-sum-exp. All probabilities of a row share its rounding error in the
// backward. float32 data would lose a digit to a float32 value; 16-bit data loses none.
template <class T>
using AttentionLse = std::conditional_t<sizeof(T) == 2, float, double>;

enum class MaskType : int8_t {
  kNone,
  kBool,     // false = -inf
  kFloat32,  // added to S
  kElement,  // added to S; the type of query
};

struct AttentionParams {
  DType dtype;
  int64_t B, H, H_kv;  // H is a multiple of H_kv; head h uses head h / (H / H_kv) of k and v
  int64_t S_q, S_k, D, D_v;
  double scale;
  bool is_causal;  // key j is visible to query i if j <= i (aligned at the top left)

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

struct AttentionBackwardParams {
  AttentionParams fwd;
  AttentionOperand dout;  // (B, H, S_q, D_v)
  // Workspace on CUDA, accumulator type: (2, B, H, S_q); (3, B, H, S_q) for float32.
  void* row_stats = nullptr;
  AttentionOperand dq;                     // (B, H, S_q, D), null if not wanted
  AttentionOperand dk;                     // (B, H_kv, S_k, D), null if not wanted
  AttentionOperand dv;                     // (B, H_kv, S_k, D_v), null if not wanted
  void* dmask = nullptr;                   // accumulator type, null if not wanted
  int64_t dmask_stride[4] = {0, 0, 0, 0};  // 0 if the mask broadcasts: the sum goes there
};

// Rows [row_begin, row_begin + rows) of the dropout factors: 0 or 1 / (1 - dropout_p).
struct AttentionDropoutParams {
  DType dtype;
  int64_t B, H, rows, row_begin, S_k;
  double dropout_p;
  const int64_t* philox_state;  // (2): seed, offset
  void* factors;                // (B, H, rows, S_k)
};

struct AttentionConfig {
  bool tensor_cores;  // else FMA
  int head_tile;      // 64, 128 or 256: D and D_v are padded to it (tensor cores only)
  bool has_extras;    // the instance with mask, dropout or an unusual scale
  const char* reason;
};

inline AttentionConfig choose_attention_config(const AttentionParams& p, const DeviceInfo& device) {
  const int64_t widest = p.D > p.D_v ? p.D : p.D_v;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16)
    return {false, 0, true, "FMA: fp32 and fp64 keep their precision"};
  if (device.sm_arch < 80) return {false, 0, true, "FMA: mma.sync of 16-bit types needs sm_80"};
  if (widest > 256) return {false, 0, true, "FMA: a head dimension above 256 fits no tile"};
  if (p.D == 0 || p.D_v == 0) return {false, 0, true, "FMA: an empty head dimension"};
  // 2^(scale * s - scale * max) needs a positive scale: a negative one would turn the maximum into
  // the minimum.
  const float scale = static_cast<float>(p.scale);
  const bool foldable = scale > 0 && scale < 1e30f;
  const bool extras = p.mask_type != MaskType::kNone || p.dropout_p > 0 || !foldable;
  const int head_tile = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  return {
      true, head_tile, extras,
      extras ? "mma.sync: with mask, dropout or an unusual scale" : "mma.sync: plain or causal"};
}

inline std::string describe(const AttentionConfig& config) {
  std::string text = "portable flash attention, ";
  if (config.tensor_cores) {
    text += "head dimensions padded to " + std::to_string(config.head_tile) + ", ";
  }
  return text + config.reason;
}

void attention_fwd_cpu(const AttentionParams& params);
void attention_bwd_cpu(const AttentionBackwardParams& params);
void attention_dropout_cpu(const AttentionDropoutParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// The generator's state, as in at::PhiloxCudaState: during graph capture only the device knows seed
// and offset.
struct PhiloxSource {
  bool captured;
  uint64_t seed, offset;
  const int64_t *seed_pointer, *offset_pointer;
  uint32_t offset_in_graph;
};

// Writes seed and offset to `philox_state` (2).
void launch_philox_state(const PhiloxSource& source, int64_t* philox_state, cudaStream_t stream);
void launch_attention_fwd(const AttentionParams& params, cudaStream_t stream);
void launch_attention_bwd(const AttentionBackwardParams& params, cudaStream_t stream);
void launch_attention_dropout(const AttentionDropoutParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
