// Shared by the files of torch/ about packed sequences: their arguments, and their ops through the
// dispatcher.
#pragma once

#include "ops/attention/torch/common.h"

namespace warpwright {

struct VarlenTensors {
  Tensor query, key, value, cu_q, cu_k;
};
// The window counts from the last query and the last key of a sequence.
struct VarlenAttributes {
  int64_t max_q = 0, max_k = 0;
  bool is_causal = false;
  std::optional<double> scale;
  OptionalInt window_left, window_right;  // none: unlimited
  double softcap = 0;                     // 0: none
};
// The same for code above the kernels, where lengths may be symbols.
struct SymVarlenAttributes {
  c10::SymInt max_q, max_k;
  bool is_causal;
  std::optional<double> scale;
  OptionalInt window_left, window_right;
  double softcap;
};

namespace call {

inline std::tuple<Tensor, Tensor> attention_varlen(const VarlenTensors& x,
                                                   const SymVarlenAttributes& a) {
  static const auto op = find_op<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
      c10::SymInt, bool, std::optional<double>, OptionalInt, OptionalInt, double)>(
      "warpwright::attention_varlen");
  return op.call(x.query, x.key, x.value, x.cu_q, x.cu_k, a.max_q, a.max_k, a.is_causal, a.scale,
                 a.window_left, a.window_right, a.softcap);
}

inline Tensors3 attention_varlen_backward(const Tensor& grad_out, const VarlenTensors& x,
                                          const Tensor& out, const Tensor& lse,
                                          const SymVarlenAttributes& a,
                                          std::array<bool, 3> output_mask,
                                          const OptionalTensor& grad_lse) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, bool,
                       std::optional<double>, OptionalInt, OptionalInt, double, std::array<bool, 3>,
                       const OptionalTensor&)>("warpwright::attention_varlen_backward");
  return op.call(grad_out, x.query, x.key, x.value, x.cu_q, x.cu_k, out, lse, a.max_q, a.max_k,
                 a.is_causal, a.scale, a.window_left, a.window_right, a.softcap, output_mask,
                 grad_lse);
}

inline Tensors5 attention_varlen_second_order(const OptionalTensor& grad_out,
                                              const OptionalTensor& grad_lse,
                                              const VarlenTensors& x, const Tensor& out,
                                              const SymVarlenAttributes& a, const Tensor& t_query,
                                              const Tensor& t_key, const Tensor& t_value) {
  static const auto op = find_op<Tensors5(
      const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
      const Tensor&, const Tensor&, const Tensor&, bool, std::optional<double>, OptionalInt,
      OptionalInt, double, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&)>(
      "warpwright::attention_varlen_second_order");
  return op.call(grad_out, grad_lse, x.query, x.key, x.value, x.cu_q, x.cu_k, out, a.is_causal,
                 a.scale, a.window_left, a.window_right, a.softcap, optional_if_defined(t_query),
                 optional_if_defined(t_key), optional_if_defined(t_value));
}

}  // namespace call

}  // namespace warpwright
