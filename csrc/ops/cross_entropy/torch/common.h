// Shared by the files of cross entropy, and called by other ops: a tensor (N, C, d1, ...) or (C) as
// rows of classes, the loss's options, and loss and gradient of a chunk of logits. Templates over
// Int serve both real sizes (int64_t) and symbolic ones (SymInt).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <optional>
#include <tuple>

namespace warpwright {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using Mask2 = std::array<bool, 2>;
using Mask3 = std::array<bool, 3>;
using Tensor2 = std::tuple<Tensor, Tensor>;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensor4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The options of every op of the loss, which its nodes keep.
struct LossOptions {
  int64_t reduction;
  c10::SymInt ignore_index;
  double label_smoothing;
  double z_loss = 0;
  // The last backward may write the gradient over the logits.
  bool inplace_backward = false;
};

struct ChunkOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;    // the logits are cap tanh(z / cap); 0: no cap
  bool gradient = true;  // false: the logits stay unchanged
};

// For an op that computes its logits chunk by chunk (linear_cross_entropy). Writes loss[r], and
// lse[r] if defined, of every row, and overwrites the logits by scale * d loss[r] / d logits[r, :].
// Runs on the logits' device (CPU or CUDA), in its current stream, below autograd, without a sync.
//   logits      (rows, C), class stride 1, any row stride; 16-byte aligned rows are fastest
//   target      (rows) int64; a bad label: NaN row and the error word (CUDA), IndexError (CPU)
//   weight      (C), or undefined
//   scale       contiguous, of the accumulator's type (float64 for float64, else float32): one
//               number, or one per row; undefined: 1. A mean passes 1 / sum of its labels' weights,
//               which the caller knows before the first chunk.
//   loss, lse   (rows), contiguous, of the accumulator's type
void cross_entropy_chunk_(const Tensor& logits, const Tensor& target, const Tensor& weight,
                          const ChunkOptions& options, const Tensor& scale, const Tensor& loss,
                          const Tensor& lse);

// Types first, because native reports them before any other error.
void check_cross_entropy_dtypes(const Tensor& input, const Tensor& target);
void check_cross_entropy(const Tensor& input, const Tensor& target, const Tensor& weight,
                         const LossOptions& options);

// On CUDA native's mean of one unbatched, ignored label is 0, not the NaN of 0 / 0. With label
// smoothing it is NaN, and on the CPU always. The loss then becomes 0 and total_weight 1, so that
// all derivatives are 0 too.
void settle_unbatched_mean(const Tensor& input, const Tensor& target, const LossOptions& options,
                           const Tensor& loss, const Tensor& total_weight);

inline int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// Class probabilities have the shape of the logits; any other target is labels.
inline bool is_probabilities(const Tensor& input, const Tensor& target) {
  return input.sym_sizes() == target.sym_sizes();
}

inline at::ScalarType accum_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

inline c10::IntArrayRef sizes_of(const Tensor& tensor, int64_t) { return tensor.sizes(); }
inline c10::SymIntArrayRef sizes_of(const Tensor& tensor, c10::SymInt) {
  return tensor.sym_sizes();
}
inline c10::IntArrayRef strides_of(const Tensor& tensor, int64_t) { return tensor.strides(); }
inline c10::SymIntArrayRef strides_of(const Tensor& tensor, c10::SymInt) {
  return tensor.sym_strides();
}
inline Tensor empty_of(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}
inline Tensor empty_of(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty_symint(sizes, options);
}

template <class Int>
struct Rows {
  Int inner, outer_stride, inner_stride, class_stride;
};

// The tensor as rows that a kernel can walk. All dimensions except the classes form two (image,
// pixel) or one, and classes or pixels are contiguous. nullopt: the tensor must be copied.
template <class Int>
std::optional<Rows<Int>> find_rows(const Tensor& tensor) {
  const auto sizes = sizes_of(tensor, Int());
  const auto strides = strides_of(tensor, Int());
  Rows<Int> rows{1, 0, 0, 1};
  for (int64_t d = tensor.dim() - 1; d >= 2; --d) {
    if (sizes[d] == 1) continue;
    if (rows.inner == 1) {
      rows.inner_stride = strides[d];
    } else if (strides[d] != rows.inner * rows.inner_stride) {
      return std::nullopt;
    }
    rows.inner = rows.inner * sizes[d];
  }
  const int64_t c = class_dim(tensor);
  if (sizes[c] != 1) rows.class_stride = strides[c];
  if (c == 1 && sizes[0] != 1) {
    rows.outer_stride = strides[0];
    if (rows.inner == 1) rows.inner_stride = rows.outer_stride;
    // A uniform stride from row to row: one image.
    if (rows.outer_stride == rows.inner * rows.inner_stride) rows.inner = rows.inner * sizes[0];
  }
  if (rows.inner == 1) rows.inner_stride = 1;  // a single row: any stride will do
  if (rows.class_stride != 1 && rows.inner_stride != 1) return std::nullopt;
  return rows;
}

// Whether the gradient may overwrite these logits: no shared elements, and rows that a kernel can
// walk.
inline bool is_walkable_in_place(const Tensor& input) {
  return input.is_non_overlapping_and_dense() && find_rows<c10::SymInt>(input).has_value();
}

// Gradients keep the memory order of dense logits (channels_last, transposed), else are contiguous.
template <class Int>
Tensor empty_gradient(const Tensor& input, at::ScalarType dtype) {
  const bool keep = input.is_non_overlapping_and_dense() && find_rows<Int>(input).has_value();
  return at::empty_like(input, input.options().dtype(dtype),
                        keep ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
}

}  // namespace warpwright
