// Autograd of attention and attention_backward. attention/torch/second_order.cpp has the formula of
// double backward and forward-mode AD.
#include <ATen/ops/detach.h>
#include <ATen/ops/zeros_like.h>

#include "ops/attention/torch/common.h"
#include "ops/attention/torch/thirds.h"
#include "torch/plain.h"

namespace warpwright {
namespace {

// Forward-mode AD and double backward are both linear in tangents (or cotangents) of query, key,
// value and mask; attention_second_order is that map. Its slots: 0 out's tangent, or the gradient
// of grad_out; 1..4 the derivative of the gradients of query, key, value and mask; 5 lse's tangent,
// or the gradient of grad_lse.
std::array<Tensor, 6> second_order(const Tensor& grad_out, const Tensor& grad_lse,
                                   const variable_list& operands, const Tensor& out,
                                   const Tensor& philox_state, const AttentionAttributes& a,
                                   const variable_list& tangents) {
  auto [t0, t1, t2, t3, t4, t5] = call::attention_second_order(
      optional_if_defined(grad_out), operands[0], operands[1], operands[2],
      optional_if_defined(operands[3]), out, philox_state, a, tangents[0], tangents[1], tangents[2],
      tangents[3], optional_if_defined(grad_lse));
  return {t0, t1, t2, t3, t4, t5};
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

// The node of split_qkv that made `operand`, from which views brought the heads forward.
const torch::autograd::Node* split_node(const Tensor& operand) {
  constexpr int kViews = 4;
  auto node = operand.grad_fn();
  for (int i = 0; i < kViews && node && node->num_outputs() == 1; ++i) {
    if (node->name() == kSplitQkvNode) return node.get();
    node = node->next_edge(0).function;
  }
  return nullptr;
}

bool are_from_split_qkv(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!is_plain(q) || !is_plain(k) || !is_plain(v)) return false;
  if (!are_thirds(q, k, v, /*heads=*/1)) return false;
  const auto* node = split_node(q);
  return node != nullptr && node == split_node(k) && node == split_node(v);
}

// Saved: query, key, value, mask, out, lse, philox_state.
struct AttentionBackward {
  static constexpr const char* kName = "WarpwrightAttentionBackward";
  struct Attributes : AttentionAttributes {
    bool from_split_qkv;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(saved[4]);
    if (writes_thirds(a, saved, grad_out, grads[1], needs)) {
      auto [dq, dk, dv, dmask] = attention_backward_in_thirds(
          grad_out, saved[0], saved[1], saved[2], optional_if_defined(saved[3]), saved[4], saved[5],
          saved[6], a, optional_if_defined(grads[1]));
      return {dq, dk, dv, dmask};
    }
    auto [dq, dk, dv, dmask] = call::attention_backward(
        grad_out, saved[0], saved[1], saved[2], optional_if_defined(saved[3]), saved[4], saved[5],
        saved[6], a, {needs[0], needs[1], needs[2], needs[3]}, optional_if_defined(grads[1]));
    return {dq, dk, dv, dmask};
  }

 private:
  // A second derivative needs ops with nodes, and modes want to see ops. Hooks of saved tensors may
  // have moved the operands.
  static bool writes_thirds(const Attributes& a, const variable_list& saved, const Tensor& grad_out,
                            const Tensor& grad_lse, const NeedsGrad& needs) {
    if (!a.from_split_qkv || at::GradMode::is_enabled()) return false;
    if (!needs[0] || !needs[1] || !needs[2] || needs[3]) return false;
    for (const Tensor& tensor : saved) {
      if (!is_plain_or_none(tensor)) return false;
    }
    return is_plain(grad_out) && is_plain_or_none(grad_lse) &&
           are_thirds(saved[0], saved[1], saved[2], /*heads=*/1);
  }
};

// Saved: grad_out, query, key, value, mask, out, philox_state, grad_lse. out and lse depend on the
// operands; the formula accounts for that, so they get no gradient of their own.
struct AttentionBackwardBackward {
  static constexpr const char* kName = "WarpwrightAttentionBackwardBackward";
  using Attributes = AttentionAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto result = second_order(saved[0], saved[7], {saved[1], saved[2], saved[3], saved[4]},
                               saved[5], saved[6], a, grads);
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
  auto node = make_node<AttentionBackward>({a, false}, query, key, value, mask);
  if (node) node->attributes.from_split_qkv = are_from_split_qkv(query, key, value);
  Tensors3 results =
      below_autograd([&] { return call::attention(query, key, value, attn_mask, a); });
  auto& [out, lse, philox_state] = results;
  if (node) {
    for (const Tensor& input : {query, key, value, mask}) node->save(input);
    // The backward takes the value of lse. Second derivatives account for its dependence, so it is
    // cut from the levels of torch.func below this one, too.
    const Tensor lse_value = below_autograd([&] { return at::detach(lse); });
    set_history(variable_list{out, lse}, node);
    node->save_output(out);
    node->save(lse_value);
    node->save(philox_state);
  }
  if (any_tangent(query, key, value, mask)) {
    const variable_list inputs{query, key, value, mask};
    const auto tangents = second_order(Tensor(), Tensor(), primals_of(inputs), primal(out),
                                       philox_state, a, tangents_of(inputs));
    set_tangent(out, tangents[0]);
    set_tangent(lse, tangents[5]);
  }
  return results;
}

Tensors4 attention_backward_autograd(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                     const Tensor& value, const OptionalTensor& attn_mask,
                                     const Tensor& out, const Tensor& lse,
                                     const Tensor& philox_state, double dropout_p, bool is_causal,
                                     std::optional<double> scale, std::array<bool, 4> output_mask,
                                     OptionalInt window_left, OptionalInt window_right,
                                     double softcap, const OptionalTensor& grad_of_lse) {
  const AttentionAttributes a{dropout_p, is_causal, scale, window_left, window_right, softcap};
  const Tensor mask = value_or_undefined(attn_mask);
  check_constant(lse, "attention_backward", "lse");
  const Tensor grad_lse = value_or_undefined(grad_of_lse);
  auto node = make_node<AttentionBackwardBackward>(a, grad_out, query, key, value, mask, grad_lse);
  auto backward = [&](const Tensor& dout, const variable_list& x, const Tensor& o,
                      const Tensor& dlse) {
    return call::attention_backward(dout, x[0], x[1], x[2], optional_if_defined(x[3]), o, lse,
                                    philox_state, a, output_mask, optional_if_defined(dlse));
  };
  const variable_list inputs{query, key, value, mask};
  Tensors4 results = below_autograd([&] { return backward(grad_out, inputs, out, grad_lse); });
  const std::array<Tensor, 4> grads{std::get<0>(results), std::get<1>(results),
                                    std::get<2>(results), std::get<3>(results)};
  if (node) {
    for (const Tensor& t : {grad_out, query, key, value, mask, out, philox_state, grad_lse})
      node->save(t);
    for (const Tensor& grad : grads) set_history(grad, node);
  }
  if (any_tangent(grad_out, query, key, value, mask, grad_lse)) {
    const variable_list primals = primals_of(inputs);
    std::array<Tensor, 6> by_operands;
    if (any_tangent(query, key, value, mask)) {
      by_operands = second_order(primal(grad_out), primal(grad_lse), primals, primal(out),
                                 philox_state, a, tangents_of(inputs));
    }
    std::array<Tensor, 4> by_grad_out;  // linear in grad_out and grad_lse
    if (any_tangent(grad_out, grad_lse)) {
      const Tensor dout = has_tangent(grad_out) ? tangent(grad_out) : at::zeros_like(primal(out));
      std::tie(by_grad_out[0], by_grad_out[1], by_grad_out[2], by_grad_out[3]) = backward(
          dout, primals, primal(out), has_tangent(grad_lse) ? tangent(grad_lse) : Tensor());
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
