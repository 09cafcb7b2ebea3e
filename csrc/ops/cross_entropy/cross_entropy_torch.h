// A tensor (N, C, d1, ...) or (C) as rows of classes: what cross_entropy's kernels walk.
// Templates over Int serve real sizes (int64_t) and symbolic ones (SymInt) alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>

namespace warpwright {

using at::Tensor;

inline int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

// Class probabilities have the shape of the logits; everything else is labels.
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

// The tensor as rows a kernel can walk: all dimensions but the class dimension as two (image,
// pixel) or one, and classes or pixels side by side. nullopt: only a copy can be walked.
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

// Gradients keep the memory order of dense logits (channels_last, transposed), else are contiguous.
template <class Int>
Tensor empty_gradient(const Tensor& input, at::ScalarType dtype) {
  const bool keep = input.is_non_overlapping_and_dense() && find_rows<Int>(input).has_value();
  return at::empty_like(input, input.options().dtype(dtype),
                        keep ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
}

// `tensor` in the memory order of `like`, without a copy if it already is.
inline Tensor in_order_of(const Tensor& tensor, const Tensor& like) {
  if (tensor.strides() == like.strides()) return tensor;
  return at::empty_like(like, tensor.options()).copy_(tensor);
}

}  // namespace warpwright
