// Cross entropy of logits z against labels or class probabilities, with log_softmax inside.
//   loss_r = sum_c w_c q_c (lse - z_c) + z_loss lse^2
//   q = smoothed target, lse = max + log(sum exp(z - max))
// Memory-bound: the forward reads the logits once, the backward reads and writes them once. Between
// them each row keeps (max, sum exp(z - max)) and, unless q is one-hot, its mass W = sum_c w_c q_c;
// nothing of the logits' size. Folding max and sum into lse would lose the sum if all logits share
// a large offset, and would round the softmax once more otherwise.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/error_record.h"

namespace warpwright {

enum class TargetKind : int8_t {
  kLabels,          // q = onehot(label)
  kSmoothedLabels,  // q = (1 - s) onehot(label) + s / C
  kProbabilities,   // q = (1 - s) target + s / C
};

enum class LossReduction : int8_t { kNone, kMean, kSum };  // at::Reduction's values

// The offset of (row r, class c) is (r / inner) * outer_stride + (r % inner) * inner_stride + c *
// class_stride. Rows count pixels of an (N, C, d1, ...) input in (n, d1, ...) order.
struct RowLayout {
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t class_stride;

  // True: the classes of a row are contiguous (rows). False: pixels are contiguous (pixels). No
  // other layout occurs.
  constexpr bool is_rows() const { return class_stride == 1; }
};

#ifdef __CUDACC__
#define WARPWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WARPWRIGHT_HOST_DEVICE inline
#endif

// The offset of row r. The first `inner` rows (all rows, if the row stride is uniform) need no
// division.
WARPWRIGHT_HOST_DEVICE int64_t row_offset(const RowLayout& layout, int64_t row) {
  if (row < layout.inner) return row * layout.inner_stride;
  return row / layout.inner * layout.outer_stride + row % layout.inner * layout.inner_stride;
}

// Shared by all passes. "Accum" is float64 for float64 logits, else float32.
struct CrossEntropyProblem {
  DType dtype;         // of the logits
  DType target_dtype;  // int64 or uint8 labels; probabilities: dtype, or float32 for 16-bit logits
  DType loss_dtype;    // of loss and grad_output: dtype or Accum
  TargetKind kind;
  LossReduction reduction;
  int64_t rows;
  int64_t classes;
  int64_t ignore_index;  // labels only
  double label_smoothing;
  double z_loss;            // PaLM's auxiliary loss; ignored rows have none
  RowLayout layout;         // of input
  RowLayout target_layout;  // of probabilities; the same is_rows() as layout
  const void* input;        // (rows, classes) by layout
  const void* target;       // (rows) labels, or (rows, classes) by target_layout
  const void* weight;       // (classes) Accum, or null
};

// Bytes of an Accum.
constexpr int64_t cross_entropy_accum_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// Numbers saved per row: max, sum exp(z - max), and, unless q is one-hot, the mass W.
constexpr int64_t num_stats(TargetKind kind) { return kind == TargetKind::kLabels ? 2 : 3; }

struct CrossEntropyParams : CrossEntropyProblem {
  void* loss;          // (rows) or one, loss_dtype
  void* stats;         // (num_stats, rows) Accum
  void* total_weight;  // one Accum: the divisor of a mean; 0 without a reduction
  void* lse;           // (rows) Accum: log sum exp; or null
  // CUDA only. The launch sets the first two, for its kernels.
  bool counted;    // total_weight is known before the forward (the gradient needs it), not a result
  void* partials;  // (plan.partials, 2) Accum, where the workspace starts
  ErrorRecord* error;  // receives the report of a bad label
};

struct CrossEntropyBackwardParams : CrossEntropyProblem {
  const void* grad_output;   // (rows) or one, loss_dtype; null: 1
  const void* stats;         // (num_stats, rows) Accum
  const void* total_weight;  // one Accum
  RowLayout grad_layout;     // of both results; the same is_rows() as layout
  void* grad_input;          // (rows, classes) by grad_layout, dtype; or null
  void* grad_target;         // (rows, classes) by grad_layout, target_dtype; or null
};

// A forward that also writes the gradient, for labels: of the reduced loss, or of each row's loss.
struct CrossEntropyGradientParams : CrossEntropyParams {
  const void* grad_output;  // (rows) or one, Accum: a factor of the gradient; null: 1
  bool grad_per_row;        // grad_output has one number per row
  RowLayout grad_layout;    // of grad_input; the same is_rows() as layout
  void* grad_input;         // (rows, classes) by grad_layout, dtype; it may be the input
  // CUDA only, for a mean; the launch sets them:
  const void* counts;  // (num_counts) Accum; their sum is total_weight
  int num_counts;
};

// The backward that a forward with gradient replaces.
inline CrossEntropyBackwardParams backward_of(const CrossEntropyGradientParams& p) {
  CrossEntropyBackwardParams b{static_cast<const CrossEntropyProblem&>(p)};
  b.loss_dtype = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (p.reduction != LossReduction::kMean) {
    b.reduction = p.grad_per_row ? LossReduction::kNone : LossReduction::kSum;
  }
  b.grad_output = p.grad_output;
  b.stats = p.stats;
  b.total_weight = p.total_weight;
  b.grad_layout = p.grad_layout;
  b.grad_input = p.grad_input;
  b.grad_target = nullptr;
  return b;
}

// The derivative of <grad_input, v> + <grad_target, u> by grad_output, input and target. It is the
// product of a symmetric Hessian with (v, u), so it is the forward-mode derivative as well. All
// (rows, classes) arrays have `layout`.
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

// Calls f<T, Q, kKind>() for the kind of target. Q, the type of probabilities, is T or Wide.
template <class T, class Wide, class F>
void for_target(const CrossEntropyProblem& p, F&& f) {
  switch (p.kind) {
    case TargetKind::kLabels:
      return f.template operator()<T, T, TargetKind::kLabels>();
    case TargetKind::kSmoothedLabels:
      return f.template operator()<T, T, TargetKind::kSmoothedLabels>();
    case TargetKind::kProbabilities:
      if (p.target_dtype == p.dtype) {
        return f.template operator()<T, T, TargetKind::kProbabilities>();
      }
      return f.template operator()<T, Wide, TargetKind::kProbabilities>();
  }
}

}  // namespace warpwright
