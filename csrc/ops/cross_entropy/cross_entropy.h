// Cross entropy of logits z against labels or class probabilities, with log_softmax inside.
//   loss_r = sum_c w_c q_c (lse - z_c),   q = smoothed target, lse = max + log(sum exp(z - max))
// Memory-bound: the forward reads the logits once, the backward reads and writes them once. Nothing
// of the logits' size is stored between them: a row leaves (max, log sum) and, for probabilities,
// its mass W = sum_c w_c q_c. max and log sum stay apart because their sum loses the second one
// when all logits share a large offset.
#pragma once

#include <cstdint>

#include "host/dtype.h"
#include "host/error_word.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class TargetKind : int8_t {
  kLabels,          // q = onehot(label)
  kSmoothedLabels,  // q = (1 - s) onehot(label) + s / C
  kProbabilities,   // q = (1 - s) target + s / C
};

enum class Reduction : int8_t { kNone, kMean, kSum };  // at::Reduction's values

// Element (row r, class c) lies at (r / inner) * outer_stride + (r % inner) * inner_stride +
// c * class_stride. Rows count pixels of an (N, C, d1, ...) input in (n, d1, ...) order.
struct RowLayout {
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t class_stride;

  // Classes side by side (rows); otherwise rows side by side (pixels), and nothing else.
  constexpr bool is_rows() const { return class_stride == 1; }
};

#ifdef __CUDACC__
#define WARPWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WARPWRIGHT_HOST_DEVICE inline
#endif

// Where row r starts. The first `inner` rows (for a uniform row stride: all) need no division.
WARPWRIGHT_HOST_DEVICE int64_t row_offset(const RowLayout& layout, int64_t row) {
  if (row < layout.inner) return row * layout.inner_stride;
  return row / layout.inner * layout.outer_stride + row % layout.inner * layout.inner_stride;
}

// What all passes share. "Accum" is float64 for float64 logits, else float32.
struct CrossEntropyProblem {
  DType dtype;         // of the logits
  DType target_dtype;  // int64 or uint8 labels; probabilities: dtype, or float32 for 16-bit logits
  DType loss_dtype;    // of loss and grad_output: dtype or Accum
  TargetKind kind;
  Reduction reduction;
  int64_t rows;
  int64_t classes;
  int64_t ignore_index;  // labels only
  double label_smoothing;
  RowLayout layout;         // of input
  RowLayout target_layout;  // of probabilities; the same is_rows() as layout
  const void* input;        // (rows, classes) by layout
  const void* target;       // (rows) labels, or (rows, classes) by target_layout
  const void* weight;       // (classes) Accum, or null
};

// Planes of the saved per-row numbers: max, log sum, and the mass for probabilities.
constexpr int64_t num_stats(TargetKind kind) { return kind == TargetKind::kProbabilities ? 3 : 2; }

struct CrossEntropyParams : CrossEntropyProblem {
  void* loss;          // (rows) or one, loss_dtype
  void* stats;         // (num_stats, rows) Accum
  void* total_weight;  // one Accum: what a mean divides by
  void* partials;      // (config.blocks, 2) Accum; unused without a reduction and on the CPU
  ErrorRecord* error;  // CUDA only
};

struct CrossEntropyBackwardParams : CrossEntropyProblem {
  const void* grad_output;   // (rows) or one, loss_dtype
  const void* stats;         // (num_stats, rows) Accum
  const void* total_weight;  // one Accum
  RowLayout grad_layout;     // of both results; the same is_rows() as layout
  void* grad_input;          // (rows, classes) by grad_layout, dtype; or null
  void* grad_target;         // (rows, classes) by grad_layout, target_dtype; or null
};

// Derivative of <grad_input, v> + <grad_target, u> by grad_output, input and target; being a
// symmetric Hessian's product with (v, u), it is the forward-mode derivative as well. All arrays
// over (rows, classes) have `layout`.
struct CrossEntropyDoubleBackwardParams : CrossEntropyProblem {
  const void* grad_output;   // (rows) or one, loss_dtype
  const void* stats;         // (num_stats, rows) Accum
  const void* total_weight;  // one Accum
  const void* v;             // dtype, or null
  const void* u;             // target_dtype, or null
  void* grad_grad_output;    // (rows) Accum, not reduced; or null
  void* grad_input;          // dtype, or null
  void* grad_target;         // target_dtype, or null
};

// How the forward and backward kernels cut the rows up. One block has `threads` threads.
struct CrossEntropyConfig {
  enum class Kernel : int8_t { kRows, kPixels };
  Kernel kernel;
  int lanes;       // kRows: threads that share a row, a power of two, or the whole block
  int vec;         // elements a memory access: 16 bytes' worth, or 1
  int threads;     // a block
  int64_t blocks;  // the grid; 1: the block loops over all rows and also reduces
  const char* reason;
};

// Alignment of the operands of one pass, as the host sees it before choosing.
struct CrossEntropyAlignment {
  bool rows_aligned;  // every row of every operand starts on a 16-byte boundary
  bool common_phase;  // all operands of a row have the same distance to one: a scalar head helps
};

CrossEntropyConfig choose_cross_entropy_config(const CrossEntropyProblem& problem,
                                               const CrossEntropyAlignment& alignment,
                                               const DeviceInfo& device);

void cross_entropy_cpu(const CrossEntropyParams& params);
void cross_entropy_backward_cpu(const CrossEntropyBackwardParams& params);
void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
CrossEntropyConfig cross_entropy_fwd_config(const CrossEntropyParams& params);
void launch_cross_entropy_fwd(const CrossEntropyParams& params, const CrossEntropyConfig& config,
                              cudaStream_t stream);
void launch_cross_entropy_bwd(const CrossEntropyBackwardParams& params, cudaStream_t stream);
void launch_cross_entropy_double_bwd(const CrossEntropyDoubleBackwardParams& params,
                                     cudaStream_t stream);
#endif

}  // namespace warpwright
