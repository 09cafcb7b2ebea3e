// rotary_embedding(query, key, cos, sin): rotates pairs of elements of every head by an angle that
// depends on the token and the pair (arXiv 2104.09864). The pairs are (i, i + rotary_size / 2), or
// (2 i, 2 i + 1) if interleaved. Elements from rotary_size on are copied.
//   x' = x cos_x - y sin_x        y' = y cos_y + x sin_y
// The backward is the transposed rotation: dx = dx' cos_x + dy' sin_y, dy = dy' cos_y - dx' sin_x.
// Memory-bound: 2E bytes each way (E = bytes of query and key); tables come from the caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// (batch, heads, tokens, head_size) with any strides, in elements; the last dimension is adjacent.
struct RotaryStrides {
  int64_t batch, head, token;
};

struct RotaryHeads {  // the query, or the key; either may have no heads
  int64_t heads;
  const void* input;
  RotaryStrides input_strides;
  void* output;
  RotaryStrides output_strides;
};

struct RotaryTable {  // (batch, tokens, rotary_size), the last dimension adjacent
  const void* data;
  int64_t batch_stride, token_stride;  // 0 along the batch: one table for all
};

struct RotaryParams {
  DType dtype;
  DType table_dtype;  // dtype, or float32 for a 16-bit dtype
  bool interleaved;
  bool inverse;  // the transposed rotation
  int64_t batch, tokens, head_size, rotary_size;
  RotaryHeads query, key;
  RotaryTable cos, sin;
};

struct RotaryPlan {
  bool vectorized;       // 16-byte accesses; else one element per access
  int heads_per_thread;  // which share the elements of cos and sin
  const char* reason;
};

inline RotaryPlan choose_rotary_embedding(const RotaryParams& p) {
  const int64_t size = dtype_size(p.dtype), table_size = dtype_size(p.table_dtype);
  const int64_t vec = 16 / size;
  // Bits below 16 of every address and pitch in bytes.
  uint64_t bits = 0;
  auto add_heads = [&](const RotaryHeads& heads) {
    bits |= reinterpret_cast<uintptr_t>(heads.input) | reinterpret_cast<uintptr_t>(heads.output);
    for (const RotaryStrides& s : {heads.input_strides, heads.output_strides}) {
      bits |= static_cast<uint64_t>((s.batch | s.head | s.token) * size);
    }
  };
  add_heads(p.query);
  add_heads(p.key);
  for (const RotaryTable& table : {p.cos, p.sin}) {
    bits |= reinterpret_cast<uintptr_t>(table.data) |
            static_cast<uint64_t>((table.batch_stride | table.token_stride) * table_size);
  }
  if (bits % 16 != 0) return {false, 1, "not all rows begin at a 16-byte boundary"};
  if (p.rotary_size % (2 * vec) != 0 || p.head_size % (2 * vec) != 0) {
    return {false, 1, "half a head is no multiple of 16 bytes"};
  }
  return {true, 2, "16-byte accesses"};
}

inline std::string describe(const RotaryPlan& plan) {
  if (!plan.vectorized) return std::string("element accesses: ") + plan.reason;
  return std::string(plan.reason) + ", " + std::to_string(plan.heads_per_thread) +
         " heads per thread";
}

void rotary_embedding_cpu(const RotaryParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_rotary_embedding(const RotaryParams& params, const RotaryPlan& plan,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
