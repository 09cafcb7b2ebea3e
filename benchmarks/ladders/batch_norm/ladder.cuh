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

constexpr int kChannels = 64;
constexpr float kEps = 1e-5f;

// y = (x - mean) / sqrt(var + eps) * weight + bias, mean and var of each channel over all rows.
struct Problem {
  const bf16* x;        // (rows, 64): an image batch with the channels innermost
  const float* weight;  // (64)
  const float* bias;    // (64)
  bf16* y;              // (rows, 64)
  char* workspace;      // a MiB
  int64_t rows;
  cudaStream_t stream;

  float* floats() const { return reinterpret_cast<float*>(workspace); }
};

struct Rung {
  int rows_multiple;
  int threads;     // of a block
  int smem_bytes;  // of a block
};

extern const Rung kRung;
void launch_rung(const Problem& p);

inline std::string describe(const Rung& r) {
  return said("rows_multiple", r.rows_multiple) + said("threads", r.threads) +
         said("smem_bytes", r.smem_bytes);
}

// tensors: x, weight, bias, workspace, y. extents: rows.
inline Problem problem_of(void* const* tensors, const int64_t* extents, cudaStream_t stream) {
  check_extent("rows", extents[0], kRung.rows_multiple);
  const char* names[] = {"x", "weight", "bias", "workspace", "y"};
  for (int i = 0; i < 5; ++i) check_pointer(names[i], tensors[i]);
  return {static_cast<const bf16*>(tensors[0]),
          static_cast<const float*>(tensors[1]),
          static_cast<const float*>(tensors[2]),
          static_cast<bf16*>(tensors[4]),
          static_cast<char*>(tensors[3]),
          extents[0],
          stream};
}

}  // namespace ladder
