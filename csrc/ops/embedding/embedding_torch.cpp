// embedding, its backward and the renormalisation of its weight on every dispatch key.
//
// The op is linear in the weight, and its backward linear in grad_output: the derivative of the
// backward is a gather again.
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include "ops/embedding/embedding.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/error_word.h"
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using c10::SymInt;

namespace call {

Tensor embedding(const Tensor& weight, const Tensor& indices, const SymInt& padding_idx,
                 bool scale_grad_by_freq) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, SymInt, bool)>("warpwright::embedding");
  return op.call(weight, indices, padding_idx, scale_grad_by_freq);
}

Tensor embedding_backward(const Tensor& grad_output, const Tensor& indices,
                          const SymInt& num_weights, const SymInt& padding_idx,
                          bool scale_grad_by_freq) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, SymInt, SymInt, bool)>(
      "warpwright::embedding_backward");
  return op.call(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq);
}

}  // namespace call

// ---- output shape and checks ----

void check_indices(const Tensor& indices, const Tensor& like, const char* op) {
  at::checkScalarTypes(op, at::TensorArg(indices, "indices", 1), {at::kLong, at::kInt});
  check_same_device(indices, like, "embedding: indices");
}

void check_embedding(const Tensor& weight, const Tensor& indices) {
  TORCH_CHECK(weight.dim() == 2, "'weight' must be 2-D, got shape ", weight.sym_sizes());
  check_indices(indices, weight, "embedding");
}

c10::SymDimVector with_columns(const Tensor& indices, const SymInt& columns) {
  const auto sizes = indices.sym_sizes();
  c10::SymDimVector result(sizes.begin(), sizes.end());
  result.push_back(columns);
  return result;
}

void check_embedding_backward(const Tensor& grad_output, const Tensor& indices,
                              const SymInt& num_weights) {
  constexpr const char* kName = "embedding_backward: grad_output";
  TORCH_CHECK(grad_output.dim() == indices.dim() + 1, kName, ": expected ", indices.dim() + 1,
              " dimensions, those of indices and the weight's columns, got ", grad_output.dim());
  check_argument(grad_output, kName, with_columns(indices, grad_output.sym_sizes().back()),
                 grad_output.scalar_type(), grad_output);
  check_indices(indices, grad_output, "embedding_backward");
  TORCH_CHECK(num_weights.sym_ge(0).expect_true(__FILE__, __LINE__),
              "embedding_backward: num_weights: expected a number of rows, got ", num_weights);
}

Tensor empty_weight(const Tensor& grad_output, const SymInt& num_weights) {
  return at::empty_symint({num_weights, grad_output.sym_sizes().back()}, grad_output.options());
}

// ---- CPU and CUDA ----

// A row that no index names stands for no padding.
constexpr int64_t kNoPadding = std::numeric_limits<int64_t>::min();

// Raises if an index names no row. Of the CPU's indices.
void check_index_range(const EmbeddingBackwardParams& p) {
  const int64_t bad = find_bad_index(p);
  TORCH_CHECK_INDEX(bad < 0, "embedding_backward: indices: index out of range: position ", bad,
                    ", counted flat, names no row of ", p.rows);
}
void check_index_range(const Tensor& indices, int64_t rows) {
  const Tensor index = indices.contiguous();
  EmbeddingBackwardParams p{};
  p.index_dtype = dtype_of(index);
  p.count = index.numel();
  p.rows = rows;
  p.padding_idx = kNoPadding;
  p.indices = index.const_data_ptr();
  check_index_range(p);
}

template <class Run>
Tensor embedding_with(const Tensor& weight, const Tensor& indices, const SymInt& padding_idx,
                      bool scale_grad_by_freq, Run&& run) {
  check_embedding(weight, indices);
  check_has_storage(weight, "embedding: weight");
  check_has_storage(indices, "embedding: indices");
  TORCH_CHECK(weight.size(0) > 0 || indices.numel() == 0,
              "embedding: weight: expected a row for the indices, got shape ", weight.sizes());
  // Integers, complex numbers and weights without an element have no kernel of ours.
  if (!is_floating(weight.scalar_type()) || weight.numel() == 0) {
    return at::embedding_symint(weight, indices, padding_idx, scale_grad_by_freq);
  }
  Tensor output = at::empty_symint(with_columns(indices, weight.sym_size(1)), weight.options());
  if (output.numel() == 0) return output;
  const Tensor index = indices.contiguous();
  const int64_t size = weight.itemsize();
  run(EmbeddingParams{.index_dtype = dtype_of(index),
                      .count = index.numel(),
                      .rows = weight.size(0),
                      .row_bytes = weight.size(1) * size,
                      .element_size = size,
                      .pitch = weight.stride(0) * size,
                      .column_pitch = weight.size(1) == 1 ? size : weight.stride(1) * size,
                      .weight = weight.const_data_ptr(),
                      .indices = index.const_data_ptr(),
                      .output = output.mutable_data_ptr(),
                      .error = nullptr});
  return output;
}

// grad_output as a matrix whose columns are neighbours.
Tensor as_rows(const Tensor& grad_output, int64_t count) {
  const int64_t columns = grad_output.size(-1);
  const Tensor rows = grad_output.reshape({count, columns});
  return columns == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

template <class Run>
Tensor embedding_backward_with(const Tensor& grad_output, const Tensor& indices,
                               const SymInt& num_weights, const SymInt& padding_idx,
                               bool scale_grad_by_freq, Run&& run) {
  check_embedding_backward(grad_output, indices, num_weights);
  check_has_storage(grad_output, "embedding_backward: grad_output");
  check_has_storage(indices, "embedding_backward: indices");
  const int64_t rows = num_weights.guard_int(__FILE__, __LINE__), count = indices.numel();
  const int64_t padding = padding_idx.guard_int(__FILE__, __LINE__);
  const bool is_long = indices.is_cuda() && (count > kEmbeddingMost || rows > kEmbeddingMost);
  if (!is_floating(grad_output.scalar_type()) || is_long) {
    if (!indices.is_cuda()) check_index_range(indices, rows);  // ATen does not
    return at::embedding_dense_backward(grad_output, indices, rows, padding, scale_grad_by_freq);
  }
  Tensor grad_weight = empty_weight(grad_output, num_weights);
  if (grad_weight.numel() == 0) return grad_weight;
  if (count == 0) return grad_weight.zero_();
  const Tensor index = indices.contiguous(), grad = as_rows(grad_output, count);
  run(EmbeddingBackwardParams{.dtype = dtype_of(grad),
                              .index_dtype = dtype_of(index),
                              .count = count,
                              .rows = rows,
                              .columns = grad.size(1),
                              .pitch = grad.stride(0),
                              .padding_idx = padding < 0 ? kNoPadding : padding,
                              .scale_grad_by_freq = scale_grad_by_freq,
                              .grad_output = grad.const_data_ptr(),
                              .indices = index.const_data_ptr(),
                              .grad_weight = grad_weight.mutable_data_ptr(),
                              .error = nullptr,
                              .sorted_rows = nullptr,
                              .sorted_positions = nullptr});
  return grad_weight;
}

// The weight is detached: its rows change in place.
template <class Run>
void embedding_renorm_with(const Tensor& weight, const Tensor& indices, double max_norm,
                           double norm_type, Run&& run) {
  check_embedding(weight, indices);
  check_has_storage(weight, "embedding_renorm_: weight");
  check_has_storage(indices, "embedding_renorm_: indices");
  at::assert_no_internal_overlap(weight);
  if (indices.numel() == 0) return;
  run(weight, indices.contiguous(), max_norm, norm_type);
}

Tensor embedding_cpu_kernel(const Tensor& weight, const Tensor& indices, SymInt padding_idx,
                            bool scale_grad_by_freq) {
  return embedding_with(
      weight, indices, padding_idx, scale_grad_by_freq, [](const EmbeddingParams& p) {
        const int64_t bad = embedding_cpu(p);
        TORCH_CHECK_INDEX(bad < 0, "index out of range in self: position ", bad,
                          " of embedding's indices, counted flat, names no row of ", p.rows);
      });
}

Tensor embedding_backward_cpu_kernel(const Tensor& grad_output, const Tensor& indices,
                                     SymInt num_weights, SymInt padding_idx,
                                     bool scale_grad_by_freq) {
  return embedding_backward_with(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq,
                                 [](const EmbeddingBackwardParams& p) {
                                   check_index_range(p);
                                   embedding_backward_cpu(p);
                                 });
}

void embedding_renorm_cpu_kernel(const Tensor& weight, const Tensor& indices, double max_norm,
                                 double norm_type) {
  embedding_renorm_with(weight, indices, max_norm, norm_type,
                        [](Tensor w, const Tensor& index, double most, double type) {
                          at::embedding_renorm_(w, index, most, type);
                        });
}

#ifdef WARPWRIGHT_WITH_CUDA
void check_embedding_strict(cudaStream_t stream) {
  const auto error = check_strict(stream);
  TORCH_CHECK_INDEX(!error.has_value(), error.value_or(""));
}

Tensor embedding_cuda_kernel(const Tensor& weight, const Tensor& indices, SymInt padding_idx,
                             bool scale_grad_by_freq) {
  check_embedding(weight, indices);
  const CudaCall cuda(weight);
  return embedding_with(weight, indices, padding_idx, scale_grad_by_freq, [&](EmbeddingParams p) {
    p.error = error_record(ErrorSource::kEmbedding);
    launch_embedding(p, choose_embedding(p), cuda.stream);
    check_embedding_strict(cuda.stream);
  });
}

Tensor embedding_backward_cuda_kernel(const Tensor& grad_output, const Tensor& indices,
                                      SymInt num_weights, SymInt padding_idx,
                                      bool scale_grad_by_freq) {
  check_embedding_backward(grad_output, indices, num_weights);
  const CudaCall cuda(grad_output);
  return embedding_backward_with(
      grad_output, indices, num_weights, padding_idx, scale_grad_by_freq,
      [&](EmbeddingBackwardParams p) {
        p.error = error_record(ErrorSource::kEmbedding);
        const EmbeddingBackwardPlan plan = choose_embedding_backward(p, current_device_info());
        const Workspace workspace(plan.workspace_bytes, grad_output);
        Tensor rows, positions;
        if (plan.is_sorted) {  // by ATen, between two launches
          rows = at::empty({p.count}, indices.options().dtype(at::kInt));
          launch_embedding_rows(p, plan, workspace.data(), rows.mutable_data_ptr<int32_t>(),
                                cuda.stream);
          std::tie(rows, positions) = at::sort(rows, std::optional<bool>(true), 0);
          p.sorted_rows = rows.const_data_ptr<int32_t>();
          p.sorted_positions = positions.const_data_ptr<int64_t>();
        }
        launch_embedding_backward(p, plan, workspace.data(), cuda.stream);
        check_embedding_strict(cuda.stream);
      });
}

void embedding_renorm_cuda_kernel(const Tensor& weight, const Tensor& indices, double max_norm,
                                  double norm_type) {
  check_embedding(weight, indices);
  const CudaCall cuda(weight);
  embedding_renorm_with(weight, indices, max_norm, norm_type,
                        [&](Tensor w, const Tensor& index, double most, double type) {
                          if (!is_floating(w.scalar_type()) || w.numel() == 0) {
                            at::embedding_renorm_(w, index, most, type);
                            return;
                          }
                          const Tensor owners =
                              at::empty({w.size(0)}, w.options().dtype(at::kLong));
                          launch_embedding_renorm(
                              EmbeddingRenormParams{.dtype = dtype_of(w),
                                                    .index_dtype = dtype_of(index),
                                                    .count = index.numel(),
                                                    .rows = w.size(0),
                                                    .columns = w.size(1),
                                                    .pitch = w.stride(0),
                                                    .column_pitch = w.stride(1),
                                                    .max_norm = most,
                                                    .norm_type = type,
                                                    .weight = w.mutable_data_ptr(),
                                                    .indices = index.const_data_ptr(),
                                                    .owners = owners.mutable_data_ptr(),
                                                    .error = error_record(ErrorSource::kEmbedding)},
                              cuda.stream);
                          check_embedding_strict(cuda.stream);
                        });
}
#endif

// ---- Meta ----

Tensor embedding_meta(const Tensor& weight, const Tensor& indices, SymInt, bool) {
  check_embedding(weight, indices);
  return at::empty_symint(with_columns(indices, weight.sym_size(1)), weight.options());
}
Tensor embedding_backward_meta(const Tensor& grad_output, const Tensor& indices, SymInt num_weights,
                               SymInt, bool) {
  check_embedding_backward(grad_output, indices, num_weights);
  return empty_weight(grad_output, num_weights);
}
void embedding_renorm_meta(const Tensor& weight, const Tensor& indices, double, double) {
  check_embedding(weight, indices);
}

// ---- Autograd ----

struct EmbeddingAttributes {
  SymInt num_weights, padding_idx;
  bool scale_grad_by_freq;
};

struct EmbeddingBackward {  // saved: indices
  static constexpr const char* kName = "WarpwrightEmbeddingBackward";
  using Attributes = EmbeddingAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    return {call::embedding_backward(grads[0], saved[0], a.num_weights, a.padding_idx,
                                     a.scale_grad_by_freq)};
  }
};

Tensor embedding_autograd(const Tensor& weight, const Tensor& indices, SymInt padding_idx,
                          bool scale_grad_by_freq) {
  check_embedding(weight, indices);
  TORCH_CHECK(
      !weight.is_complex() || !needs_gradient(weight),
      "embedding does not support automatic differentiation for outputs with complex dtype.");
  auto node =
      make_node<EmbeddingBackward>({weight.sym_size(0), padding_idx, scale_grad_by_freq}, weight);
  Tensor output = below_autograd(
      [&] { return call::embedding(weight, indices, padding_idx, scale_grad_by_freq); });
  if (node) {
    node->save(indices);
    set_history(output, node);
  }
  if (has_tangent(weight)) {
    set_tangent(output, call::embedding(tangent(weight), indices, padding_idx, scale_grad_by_freq));
  }
  return output;
}

// The backward's transpose: each position reads its row, as the backward scaled it.
Tensor gather_scaled(const Tensor& rows, const Tensor& indices, const EmbeddingAttributes& a) {
  Tensor result = call::embedding(rows, indices, SymInt(-1), false);
  if (a.scale_grad_by_freq) {
    const auto type = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor ones =
        at::ones_symint(with_columns(indices, SymInt(1)), rows.options().dtype(type));
    const Tensor counts = call::embedding_backward(ones, indices, a.num_weights, SymInt(-1), false);
    const Tensor of_position = call::embedding(counts, indices, SymInt(-1), false);
    result = (result.to(type) / of_position).to(rows.scalar_type());
  }
  if (a.padding_idx >= 0) {
    result = result.masked_fill((indices == a.padding_idx).unsqueeze(-1), 0);
  }
  return result;
}

struct EmbeddingBackwardBackward {  // saved: indices
  static constexpr const char* kName = "WarpwrightEmbeddingBackwardBackward";
  using Attributes = EmbeddingAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    return {gather_scaled(grads[0], saved[0], a)};
  }
};

Tensor embedding_backward_autograd(const Tensor& grad_output, const Tensor& indices,
                                   SymInt num_weights, SymInt padding_idx,
                                   bool scale_grad_by_freq) {
  check_embedding_backward(grad_output, indices, num_weights);
  auto node = make_node<EmbeddingBackwardBackward>({num_weights, padding_idx, scale_grad_by_freq},
                                                   grad_output);
  Tensor grad_weight = below_autograd([&] {
    return call::embedding_backward(grad_output, indices, num_weights, padding_idx,
                                    scale_grad_by_freq);
  });
  if (node) {
    node->save(indices);
    set_history(grad_weight, node);
  }
  if (has_tangent(grad_output)) {
    set_tangent(grad_weight, call::embedding_backward(tangent(grad_output), indices, num_weights,
                                                      padding_idx, scale_grad_by_freq));
  }
  return grad_weight;
}

void embedding_renorm_autograd(const Tensor& weight, const Tensor& indices, double max_norm,
                               double norm_type) {
  static const auto op =
      find_op<void(const Tensor&, const Tensor&, double, double)>("warpwright::embedding_renorm_");
  check_constant(weight, "embedding_renorm_", "weight");
  below_autograd([&] { op.call(weight, indices, max_norm, norm_type); });
  if (!weight.is_inference()) torch::autograd::impl::bump_version(weight);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, "
      "bool scale_grad_by_freq=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "embedding_backward(Tensor grad_output, Tensor indices, SymInt num_weights, "
      "SymInt padding_idx, bool scale_grad_by_freq) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "embedding_renorm_(Tensor(a!) weight, Tensor indices, float max_norm, float norm_type) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("embedding", embedding_cpu_kernel);
  m.impl("embedding_backward", embedding_backward_cpu_kernel);
  m.impl("embedding_renorm_", embedding_renorm_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("embedding", embedding_cuda_kernel);
  m.impl("embedding_backward", embedding_backward_cuda_kernel);
  m.impl("embedding_renorm_", embedding_renorm_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("embedding", embedding_meta);
  m.impl("embedding_backward", embedding_backward_meta);
  m.impl("embedding_renorm_", embedding_renorm_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("embedding", embedding_autograd);
  m.impl("embedding_backward", embedding_backward_autograd);
  m.impl("embedding_renorm_", embedding_renorm_autograd);
}

}  // namespace warpwright
