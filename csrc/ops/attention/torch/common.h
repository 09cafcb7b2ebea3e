// Shared by the files of torch/: the arguments that attention's ops take, and the ops through the
// dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "torch/autograd.h"
#include "torch/dispatch.h"

namespace warpwright {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The non-tensor arguments of every op.
struct AttentionAttributes {
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  std::optional<int64_t> window_left, window_right;  // none: unlimited
  double softcap = 0;                                // 0: none
};

// AttentionLse
inline at::ScalarType lse_type(const Tensor& tensor) {
  const bool wide = tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kFloat;
  return wide ? at::kDouble : at::kFloat;
}

using OptionalInt = std::optional<int64_t>;

// Checks the softcap; `name` is the op's. Defined in checks.cpp.
void check_softcap(const char* name, double softcap);

// Checks types, devices and matching extents, at any rank; defined in checks.cpp.
void check_attention_operands(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& attn_mask, double dropout_p);
// Checks the operands of attention and attention_backward, (B, H, S, D); defined in checks.cpp.
void check_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& attn_mask, double dropout_p);

// Backward without attn_mask's gradient and without nodes, for query, key and value that are the
// thirds of one matrix (are_thirds() in thirds.h). Their gradients are the thirds of one too.
// Defined in ops.cpp.
Tensors4 attention_backward_in_thirds(const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value,
                                      const OptionalTensor& attn_mask, const Tensor& out,
                                      const Tensor& lse, const Tensor& philox_state,
                                      const AttentionAttributes& a, const OptionalTensor& grad_lse);

// The ops through the dispatcher. Called qualified: at:: has functions of the same names.
namespace call {

inline Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key,
                                           const Tensor& value, const OptionalTensor& attn_mask,
                                           const AttentionAttributes& a, bool enable_gqa) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double,
                     bool, std::optional<double>, bool)>(
          "warpwright::scaled_dot_product_attention");
  return op.call(query, key, value, attn_mask, a.dropout_p, a.is_causal, a.scale, enable_gqa);
}

inline Tensor scaled_dot_product_attention_extras(const Tensor& query, const Tensor& key,
                                                  const Tensor& value,
                                                  const OptionalTensor& attn_mask,
                                                  const AttentionAttributes& a, bool enable_gqa) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double,
                     bool, std::optional<double>, bool, OptionalInt, OptionalInt, double)>(
          "warpwright::scaled_dot_product_attention_extras");
  return op.call(query, key, value, attn_mask, a.dropout_p, a.is_causal, a.scale, enable_gqa,
                 a.window_left, a.window_right, a.softcap);
}

inline Tensors3 attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const OptionalTensor& attn_mask, const AttentionAttributes& a) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double,
                       bool, std::optional<double>, OptionalInt, OptionalInt, double)>(
          "warpwright::attention");
  return op.call(query, key, value, attn_mask, a.dropout_p, a.is_causal, a.scale, a.window_left,
                 a.window_right, a.softcap);
}

inline Tensors4 attention_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                   const Tensor& value, const OptionalTensor& attn_mask,
                                   const Tensor& out, const Tensor& lse, const Tensor& philox_state,
                                   const AttentionAttributes& a, std::array<bool, 4> output_mask,
                                   const OptionalTensor& grad_lse) {
  static const auto op =
      find_op<Tensors4(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, double,
                       bool, std::optional<double>, std::array<bool, 4>, OptionalInt, OptionalInt,
                       double, const OptionalTensor&)>("warpwright::attention_backward");
  return op.call(grad_out, query, key, value, attn_mask, out, lse, philox_state, a.dropout_p,
                 a.is_causal, a.scale, output_mask, a.window_left, a.window_right, a.softcap,
                 grad_lse);
}

inline Tensors6 attention_second_order(const OptionalTensor& grad_out, const Tensor& query,
                                       const Tensor& key, const Tensor& value,
                                       const OptionalTensor& attn_mask, const Tensor& out,
                                       const Tensor& philox_state, const AttentionAttributes& a,
                                       const Tensor& t_query, const Tensor& t_key,
                                       const Tensor& t_value, const Tensor& t_mask,
                                       const OptionalTensor& grad_lse) {
  static const auto op = find_op<Tensors6(
      const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
      const Tensor&, const Tensor&, double, bool, std::optional<double>, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, OptionalInt, OptionalInt,
      double, const OptionalTensor&)>("warpwright::attention_second_order");
  return op.call(grad_out, query, key, value, attn_mask, out, philox_state, a.dropout_p,
                 a.is_causal, a.scale, optional_if_defined(t_query), optional_if_defined(t_key),
                 optional_if_defined(t_value), optional_if_defined(t_mask), a.window_left,
                 a.window_right, a.softcap, grad_lse);
}

inline Tensor attention_dropout_factors(const Tensor& philox_state, at::ScalarType dtype,
                                        double dropout_p, int64_t B, int64_t H, int64_t row_begin,
                                        int64_t rows, int64_t S_k) {
  static const auto op =
      find_op<Tensor(const Tensor&, at::ScalarType, double, int64_t, int64_t, int64_t, int64_t,
                     int64_t)>("warpwright::attention_dropout_factors");
  return op.call(philox_state, dtype, dropout_p, B, H, row_begin, rows, S_k);
}

}  // namespace call

}  // namespace warpwright
