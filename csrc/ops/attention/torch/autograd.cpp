// Autograd of attention and attention_backward. attention/torch/second_order.cpp has the formula of
// double backward and forward-mode AD.
#include "ops/attention/torch/common.h"

namespace warpwright {
namespace {

// Forward-mode AD and double backward are both linear in tangents (or cotangents) of query, key,
// value and mask; attention_second_order is that map. Its slots: 0 out's tangent, or the gradient
// of grad_out; 1..4 the derivative of the gradients of query, key, value and mask.
std::array<Tensor, 5> second_order(const Tensor& grad_out, const variable_list& operands,
                                   const Tensor& out, const Tensor& philox_state,
                                   const AttentionAttributes& a, const variable_list& tangents) {
  auto [t0, t1, t2, t3, t4] =
      call::attention_second_order(optional_if_defined(grad_out), operands[0], operands[1],
                                   operands[2], optional_if_defined(operands[3]), out, philox_state,
                                   a, tangents[0], tangents[1], tangents[2], tangents[3]);
  return {t0, t1, t2, t3, t4};
}

variable_list primals_of(const variable_list& tensors) {
  variable_list primals;
  for (const Tensor& t : tensors) primals.push_back(primal(t));
  return primals;
}

variable_list tangents_of(const variable_list& tensors) {
  variable_list tangents;
  for (const Tensor& t : tensors) tangents.push_back(has_tangent(t) ? tangent(t) : Tensor());
  return tangents;
}

// Saved: query, key, value, mask, out, lse, philox_state.
struct AttentionBackward {
  static constexpr const char* kName = "WarpwrightAttentionBackward";
  using Attributes = AttentionAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dq, dk, dv, dmask] = call::attention_backward(
        grads[0], saved[0], saved[1], saved[2], optional_if_defined(saved[3]), saved[4], saved[5],
        saved[6], a, {needs[0], needs[1], needs[2], needs[3]});
    return {dq, dk, dv, dmask};
  }
};

// Saved: grad_out, query, key, value, mask, out, philox_state. out and lse depend on the operands;
// the formula accounts for that, so they get no gradient of their own.
struct AttentionBackwardBackward {
  static constexpr const char* kName = "WarpwrightAttentionBackwardBackward";
  using Attributes = AttentionAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto result = second_order(saved[0], {saved[1], saved[2], saved[3], saved[4]}, saved[5],
                               saved[6], a, grads);
    variable_list out(result.begin(), result.end());
    // The output is linear in value, so no second derivative contains value twice.
    const bool moves_scores = grads[0].defined() || grads[1].defined() || grads[3].defined();
    if (!moves_scores) out[3] = Tensor();
    for (size_t i = 0; i < out.size(); ++i) {
      if (!needs[i]) out[i] = Tensor();
    }
    return out;
  }
};

Tensors3 attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                            const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                            std::optional<double> scale, OptionalInt window_left,
                            OptionalInt window_right, double softcap) {
  const AttentionAttributes a{dropout_p, is_causal, scale, window_left, window_right, softcap};
  const Tensor mask = value_or_undefined(attn_mask);
  auto node = make_node<AttentionBackward>(a, query, key, value, mask);
  Tensors3 results =
      below_autograd([&] { return call::attention(query, key, value, attn_mask, a); });
  auto& [out, lse, philox_state] = results;
  if (node) {
    for (const Tensor& input : {query, key, value, mask}) node->save(input);
    set_history(out, node);
    node->save_output(out);
    node->save(lse);
    node->save(philox_state);
  }
  if (any_tangent(query, key, value, mask)) {
    const variable_list inputs{query, key, value, mask};
    set_tangent(out, second_order(Tensor(), primals_of(inputs), primal(out), philox_state, a,
                                  tangents_of(inputs))[0]);
  }
  return results;
}

Tensors4 attention_backward_autograd(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                     const Tensor& value, const OptionalTensor& attn_mask,
                                     const Tensor& out, const Tensor& lse,
                                     const Tensor& philox_state, double dropout_p, bool is_causal,
                                     std::optional<double> scale, std::array<bool, 4> output_mask,
                                     OptionalInt window_left, OptionalInt window_right,
                                     double softcap) {
  const AttentionAttributes a{dropout_p, is_causal, scale, window_left, window_right, softcap};
  const Tensor mask = value_or_undefined(attn_mask);
  check_constant(lse, "attention_backward", "lse");
  auto node = make_node<AttentionBackwardBackward>(a, grad_out, query, key, value, mask);
  auto backward = [&](const Tensor& dout, const variable_list& x, const Tensor& o) {
    return call::attention_backward(dout, x[0], x[1], x[2], optional_if_defined(x[3]), o, lse,
                                    philox_state, a, output_mask);
  };
  const variable_list inputs{query, key, value, mask};
  Tensors4 results = below_autograd([&] { return backward(grad_out, inputs, out); });
  const std::array<Tensor, 4> grads{std::get<0>(results), std::get<1>(results),
                                    std::get<2>(results), std::get<3>(results)};
  if (node) {
    for (const Tensor& t : {grad_out, query, key, value, mask, out, philox_state}) node->save(t);
    for (const Tensor& grad : grads) set_history(grad, node);
  }
  if (any_tangent(grad_out, query, key, value, mask)) {
    const variable_list primals = primals_of(inputs);
    std::array<Tensor, 5> by_operands;
    if (any_tangent(query, key, value, mask)) {
      by_operands = second_order(primal(grad_out), primals, primal(out), philox_state, a,
                                 tangents_of(inputs));
    }
    std::array<Tensor, 4> by_grad_out;  // linear in grad_out
    if (has_tangent(grad_out)) {
      std::tie(by_grad_out[0], by_grad_out[1], by_grad_out[2], by_grad_out[3]) =
          backward(tangent(grad_out), primals, primal(out));
    }
    for (int i = 0; i < 4; ++i) {
      if (!grads[i].defined()) continue;
      set_tangent(grads[i], sum_of(by_operands[i + 1], by_grad_out[i]));
    }
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_backward", attention_backward_autograd);
  m.impl("attention_dropout_factors", torch::CppFunction::makeFallthrough());
}

}  // namespace warpwright
