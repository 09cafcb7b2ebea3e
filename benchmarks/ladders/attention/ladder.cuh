// What the rungs share: the call, and what a rung says about itself. entry.cu calls launch_rung();
// each rung's file defines it and kRung.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"

namespace ladder {

using warpwright::bf16;

constexpr int kHead = 128;  // elements of a query, key or value
// 1 / sqrt(128), and log2(e): exp(s x) is 2^(s log2(e) x).
constexpr float kScale = 0.08838834764831845f;
constexpr float kScaleLog2 = kScale * 1.44269504088896341f;

// out = softmax(q k^T / sqrt(128)) v, for each head.
struct Problem {
  const bf16* q;  // (heads, tokens, 128), as all four
  const bf16* k;
  const bf16* v;
  bf16* out;
  char* workspace;  // 4 bytes per score, and a MiB
  int heads;
  int tokens;
  cudaStream_t stream;

  int64_t rows() const { return int64_t{heads} * tokens; }
};

struct Rung {
  int tokens_multiple;
  int threads;     // of a block
  int smem_bytes;  // of a block
};

extern const Rung kRung;
void launch_rung(const Problem& p);

inline std::string describe(const Rung& r) {
  return said("tokens_multiple", r.tokens_multiple) + said("threads", r.threads) +
         said("smem_bytes", r.smem_bytes);
}

// tensors: q, k, v, workspace, out. extents: heads, tokens.
inline Problem problem_of(void* const* tensors, const int64_t* extents, cudaStream_t stream) {
  check_extent("heads", extents[0], 1);
  check_extent("tokens", extents[1], kRung.tokens_multiple);
  const char* names[] = {"q", "k", "v", "workspace", "out"};
  for (int i = 0; i < 5; ++i) check_pointer(names[i], tensors[i]);
  return {static_cast<const bf16*>(tensors[0]), static_cast<const bf16*>(tensors[1]),
          static_cast<const bf16*>(tensors[2]), static_cast<bf16*>(tensors[4]),
          static_cast<char*>(tensors[3]),       static_cast<int>(extents[0]),
          static_cast<int>(extents[1]),         stream};
}

}  // namespace ladder
