// The kernels of a classifier's head (cuda/head.cu): few outputs, and a batch that a few blocks
// read. One launch forward, and one for all gradients.
#pragma once

#include <cstdint>

#include "gemm/params.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

constexpr int64_t kMaxHeadOutputs = 16;
constexpr int64_t kMaxHeadRows = 512;
constexpr int64_t kMaxHeadFeatures = 1024;
constexpr int64_t kMaxHeadForwardFeatures = 256;  // in shared memory

constexpr bool is_head(int64_t rows, int64_t features, int64_t outputs) {
  auto within = [](int64_t extent, int64_t most) { return extent > 0 && extent <= most; };
  return within(rows, kMaxHeadRows) && within(features, kMaxHeadFeatures) &&
         within(outputs, kMaxHeadOutputs);
}

inline bool takes_head(const GemmParams& p) {
  const bool along_k = p.k == 1 || (p.a.major == Major::kK && p.b.major == Major::kK);
  return is_head(p.m, p.k, p.n) && p.k <= kMaxHeadForwardFeatures && along_k && !p.accum_d &&
         !p.accumulate;
}

struct LinearHeadGradients {
  DType dtype;
  int64_t rows;
  int64_t features;
  int64_t outputs;
  const void* dy;  // (rows, outputs)
  int64_t dy_stride_row;
  int64_t dy_stride_col;
  const void* x;  // (rows, features), rows x_stride apart
  int64_t x_stride;
  const void* weight;  // (outputs, features), rows weight_stride apart
  int64_t weight_stride;
  void* dx;  // (rows, features); null: not wanted, like the next two
  void* dw;  // (outputs, features)
  void* db;  // (outputs)
};

#ifdef WARPWRIGHT_WITH_CUDA
void launch_linear_head(const GemmParams& params, cudaStream_t stream);
void launch_linear_head_gradients(const LinearHeadGradients& params, cudaStream_t stream);
#endif

}  // namespace warpwright
