// What the rungs share: the call, and what a rung says about itself. entry.cu calls launch_rung();
// each rung's file defines it and kRung.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"

namespace ladder {

// Rungs 1 to 5: result = the sum of x. Rungs 6 to 8: result = softmax of each row of x.
// Rung 9: loss = cross-entropy of each row with its label, result = the gradient of their sum.
struct Problem {
  const float* x;         // (rows, cols), dense
  const int64_t* labels;  // (rows); rung 9 only, else null
  float* result;          // one number, or (rows, cols)
  float* loss;            // (rows); rung 9 only, else null
  char* workspace;        // what the task gives: a byte per 32 of x, and a MiB
  int64_t rows;
  int64_t cols;
  cudaStream_t stream;

  int64_t numel() const { return rows * cols; }
};

enum class Function { kSum, kSoftmax, kCrossEntropy };

struct Rung {
  Function function;
  int cols_multiple;  // the columns are a multiple of it
  int max_cols;       // and at most as many
  int threads;        // of a block
  int smem_bytes;     // of a block, static and dynamic
};

extern const Rung kRung;
void launch_rung(const Problem& p);

inline std::string describe(const Rung& r) {
  return said("cols_multiple", r.cols_multiple) + said("max_cols", r.max_cols) +
         said("threads", r.threads) + said("smem_bytes", r.smem_bytes);
}

// tensors: x, workspace, result; rung 9: x, labels, workspace, result, loss. extents: rows, cols.
inline Problem problem_of(void* const* tensors, const int64_t* extents, cudaStream_t stream) {
  const bool labelled = kRung.function == Function::kCrossEntropy;
  Problem p{};
  p.x = static_cast<const float*>(*tensors++);
  if (labelled) p.labels = static_cast<const int64_t*>(*tensors++);
  p.workspace = static_cast<char*>(*tensors++);
  p.result = static_cast<float*>(*tensors++);
  if (labelled) p.loss = static_cast<float*>(*tensors++);
  p.rows = extents[0];
  p.cols = extents[1];
  p.stream = stream;
  check_extent("rows", p.rows, 1);
  check_extent("cols", p.cols, kRung.cols_multiple);
  if (p.cols > kRung.max_cols) {
    throw std::invalid_argument("cols = " + std::to_string(p.cols) + ": expected at most " +
                                std::to_string(kRung.max_cols));
  }
  check_pointer("x", p.x);
  check_pointer("workspace", p.workspace);
  check_pointer("result", p.result);
  return p;
}

constexpr int kAnyCols = (1 << 30) - 1;

}  // namespace ladder
