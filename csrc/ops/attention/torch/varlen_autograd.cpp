// Autograd and autocast of attention_varlen. Second derivatives are those of one dense call whose
// mask hides the pairs of different sequences.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "ops/attention/torch/varlen.h"
#include "torch/check_argument.h"

namespace warpwright {
namespace {

// ---- second derivatives ----

// Of each token: its sequence, and how far it is before the end of it. Tokens of no sequence are in
// sequence `none`, or in the number of sequences.
struct TokenPlaces {
  Tensor sequence, from_end;

  TokenPlaces(const Tensor& ends, int64_t tokens, int64_t none) {
    const Tensor token = at::arange(tokens, ends.options()), last = ends.slice(0, 1);
    sequence = at::bucketize(token, last.contiguous(), /*out_int32=*/false, /*right=*/true);
    const int64_t count = last.sym_size(0).guard_int(__FILE__, __LINE__);
    if (count > 0)
      from_end = token - last.index_select(0, sequence.clamp_max(count - 1));
    else
      from_end = token;
    sequence =
        sequence.masked_fill((token < ends.select(0, 0)).logical_or(sequence == count), none);
  }
};

// True where a query sees a key, (1, 1, queries, keys).
Tensor packed_mask(const VarlenTensors& x, bool is_causal, OptionalInt left, OptionalInt right) {
  const auto tokens = [](const Tensor& t) { return t.sym_size(0).guard_int(__FILE__, __LINE__); };
  const TokenPlaces q(x.cu_q, tokens(x.query), -1), k(x.cu_k, tokens(x.key), -2);
  Tensor visible = q.sequence.unsqueeze(1) == k.sequence;
  const Tensor ahead = k.from_end - q.from_end.unsqueeze(1);
  if (is_causal) visible = visible.logical_and(ahead <= 0);
  if (right) visible = visible.logical_and(ahead <= *right);
  if (left) visible = visible.logical_and(ahead.neg() <= *left);
  return visible.unsqueeze(0).unsqueeze(0);
}

// (tokens, heads, D) to (1, heads, tokens, D), and back; (heads, tokens) to (1, heads, tokens).
Tensor to_batch(const Tensor& t) { return t.defined() ? t.transpose(0, 1).unsqueeze(0) : t; }
Tensor from_batch(const Tensor& t) { return t.defined() ? t.squeeze(0).transpose(0, 1) : t; }

Tensors5 varlen_second_order(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                             const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                             const Tensor& out, bool is_causal, std::optional<double> scale,
                             OptionalInt window_left, OptionalInt window_right, double softcap,
                             const OptionalTensor& t_query, const OptionalTensor& t_key,
                             const OptionalTensor& t_value) {
  const char* name = "attention_varlen_second_order: an argument";
  for (const Tensor* t : {&query, &key, &value, &out}) {
    TORCH_CHECK(t->dim() == 3, name, ": expected (tokens, heads, head size), got shape ",
                t->sym_sizes());
    check_plain_storage(*t, name);
  }
  for (const Tensor* t : {&cu_seqlens_q, &cu_seqlens_k}) {
    TORCH_CHECK(t->dim() == 1 && t->sym_size(0) >= 1, name,
                ": expected the ends of sequences, got shape ", t->sym_sizes());
    check_plain_storage(*t, name);
  }
  for (const OptionalTensor* t : {&grad_out, &grad_lse, &t_query, &t_key, &t_value})
    check_plain_storage(value_or_undefined(*t), name);
  const Tensor mask = packed_mask({query, key, value, cu_seqlens_q, cu_seqlens_k}, is_causal,
                                  window_left, window_right);
  AttentionAttributes a{.scale = scale, .softcap = softcap};
  const Tensor dlse = value_or_undefined(grad_lse);
  auto batch = [](const OptionalTensor& t) { return to_batch(value_or_undefined(t)); };
  const auto [d_grad_out, dq, dk, dv, dmask, d_grad_lse] = call::attention_second_order(
      optional_if_defined(batch(grad_out)), to_batch(query), to_batch(key), to_batch(value), mask,
      to_batch(out), at::empty({0}, query.options().dtype(at::kLong)), a, batch(t_query),
      batch(t_key), batch(t_value), Tensor(),
      optional_if_defined(dlse.defined() ? dlse.unsqueeze(0) : dlse));
  return {from_batch(d_grad_out), from_batch(dq), from_batch(dk), from_batch(dv),
          d_grad_lse.squeeze(0)};
}

// Slots: 0 out's tangent, or the gradient of grad_out; 1..3 the derivative of the gradients of
// query, key and value; 4 lse's tangent, or the gradient of grad_lse.
std::array<Tensor, 5> second_order(const Tensor& grad_out, const Tensor& grad_lse,
                                   const VarlenTensors& x, const Tensor& out,
                                   const SymVarlenAttributes& a, const variable_list& tangents) {
  auto [t0, t1, t2, t3, t4] = call::attention_varlen_second_order(
      optional_if_defined(grad_out), optional_if_defined(grad_lse), x, out, a, tangents[0],
      tangents[1], tangents[2]);
  return {t0, t1, t2, t3, t4};
}

// ---- Autograd ----

VarlenTensors primals_of(const VarlenTensors& x) {
  return {primal(x.query), primal(x.key), primal(x.value), x.cu_q, x.cu_k};
}
variable_list tangents_of(const VarlenTensors& x) {
  variable_list tangents;
  for (const Tensor& t : {x.query, x.key, x.value})
    tangents.push_back(has_tangent(t) ? tangent(t) : Tensor());
  return tangents;
}

// Saved: query, key, value, cu_seqlens_q, cu_seqlens_k, out, lse.
struct VarlenBackward {
  static constexpr const char* kName = "WarpwrightAttentionVarlenBackward";
  using Attributes = SymVarlenAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(saved[5]);
    auto [dq, dk, dv] = call::attention_varlen_backward(
        grad_out, {saved[0], saved[1], saved[2], saved[3], saved[4]}, saved[5], saved[6], a,
        {needs[0], needs[1], needs[2]}, optional_if_defined(grads[1]));
    return {dq, dk, dv};
  }
};

// Saved: grad_out, query, key, value, cu_seqlens_q, cu_seqlens_k, out, grad_lse. out and lse depend
// on the operands; the formula accounts for that, so they get no gradient of their own.
struct VarlenBackwardBackward {
  static constexpr const char* kName = "WarpwrightAttentionVarlenBackwardBackward";
  using Attributes = SymVarlenAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto result = second_order(
        saved[0], saved[7], {saved[1], saved[2], saved[3], saved[4], saved[5]}, saved[6], a, grads);
    variable_list out(result.begin(), result.end());
    // The output is linear in value, so no second derivative contains value twice.
    if (!grads[0].defined() && !grads[1].defined()) out[3] = Tensor();
    for (size_t i = 0; i < out.size(); ++i) {
      if (!needs[i]) out[i] = Tensor();
    }
    return out;
  }
};

std::tuple<Tensor, Tensor> varlen_autograd(const Tensor& query, const Tensor& key,
                                           const Tensor& value, const Tensor& cu_seqlens_q,
                                           const Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q,
                                           c10::SymInt max_seqlen_k, bool is_causal,
                                           std::optional<double> scale, OptionalInt window_left,
                                           OptionalInt window_right, double softcap) {
  const SymVarlenAttributes a{max_seqlen_q, max_seqlen_k, is_causal, scale,
                              window_left,  window_right, softcap};
  const VarlenTensors x{query, key, value, cu_seqlens_q, cu_seqlens_k};
  auto node = make_node<VarlenBackward>(a, query, key, value);
  auto results = below_autograd([&] { return call::attention_varlen(x, a); });
  auto& [out, lse] = results;
  if (node) {
    for (const Tensor& t : {query, key, value, cu_seqlens_q, cu_seqlens_k}) node->save(t);
    // The backward takes the value of lse. Second derivatives account for its dependence, so it is
    // cut from the levels of torch.func below this one, too.
    const Tensor lse_value = below_autograd([&] { return at::detach(lse); });
    set_history(variable_list{out, lse}, node);
    node->save_output(out);
    node->save(lse_value);
  }
  if (any_tangent(query, key, value)) {
    const auto tangents =
        second_order(Tensor(), Tensor(), primals_of(x), primal(out), a, tangents_of(x));
    set_tangent(out, tangents[0]);
    set_tangent(lse, tangents[4]);
  }
  return results;
}

Tensors3 varlen_backward_autograd(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& cu_seqlens_q,
                                  const Tensor& cu_seqlens_k, const Tensor& out, const Tensor& lse,
                                  c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
                                  bool is_causal, std::optional<double> scale,
                                  OptionalInt window_left, OptionalInt window_right, double softcap,
                                  std::array<bool, 3> output_mask,
                                  const OptionalTensor& grad_of_lse) {
  const SymVarlenAttributes a{max_seqlen_q, max_seqlen_k, is_causal, scale,
                              window_left,  window_right, softcap};
  const VarlenTensors x{query, key, value, cu_seqlens_q, cu_seqlens_k};
  const Tensor grad_lse = value_or_undefined(grad_of_lse);
  check_constant(lse, "attention_varlen_backward", "lse");
  auto node = make_node<VarlenBackwardBackward>(a, grad_out, query, key, value, grad_lse);
  auto backward = [&](const Tensor& dout, const VarlenTensors& of, const Tensor& o,
                      const Tensor& dlse) {
    return call::attention_varlen_backward(dout, of, o, lse, a, output_mask,
                                           optional_if_defined(dlse));
  };
  Tensors3 results = below_autograd([&] { return backward(grad_out, x, out, grad_lse); });
  const std::array<Tensor, 3> grads{std::get<0>(results), std::get<1>(results),
                                    std::get<2>(results)};
  if (node) {
    for (const Tensor& t : {grad_out, query, key, value, cu_seqlens_q, cu_seqlens_k, out, grad_lse})
      node->save(t);
    for (const Tensor& grad : grads) set_history(grad, node);
  }
  if (any_tangent(grad_out, query, key, value, grad_lse)) {
    const VarlenTensors primals = primals_of(x);
    std::array<Tensor, 5> by_operands;
    if (any_tangent(query, key, value))
      by_operands =
          second_order(primal(grad_out), primal(grad_lse), primals, primal(out), a, tangents_of(x));
    std::array<Tensor, 3> by_grads;  // linear in grad_out and grad_lse
    if (any_tangent(grad_out, grad_lse)) {
      const Tensor dout = has_tangent(grad_out) ? tangent(grad_out) : at::zeros_like(primal(out));
      std::tie(by_grads[0], by_grads[1], by_grads[2]) = backward(
          dout, primals, primal(out), has_tangent(grad_lse) ? tangent(grad_lse) : Tensor());
    }
    for (size_t i = 0; i < 3; ++i) {
      if (!grads[i].defined()) continue;
      set_tangent(grads[i], sum_of(by_operands[i + 1], by_grads[i]));
    }
  }
  return results;
}

// ---- Autocast ----

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::tuple<Tensor, Tensor> varlen_autocast(const Tensor& query, const Tensor& key,
                                           const Tensor& value, const Tensor& cu_seqlens_q,
                                           const Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q,
                                           c10::SymInt max_seqlen_k, bool is_causal,
                                           std::optional<double> scale, OptionalInt window_left,
                                           OptionalInt window_right, double softcap) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, kDevice); };
  return call::attention_varlen(
      {cast(query), cast(key), cast(value), cu_seqlens_q, cu_seqlens_k},
      {max_seqlen_q, max_seqlen_k, is_causal, scale, window_left, window_right, softcap});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "attention_varlen_second_order(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
      "Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, bool is_causal, "
      "float? scale, int? window_left, int? window_right, float softcap, Tensor? t_query, "
      "Tensor? t_key, Tensor? t_value) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.impl(
      "attention_varlen_second_order",
      torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(varlen_second_order)));
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("attention_varlen", varlen_autograd);
  m.impl("attention_varlen_backward", varlen_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("attention_varlen", varlen_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("attention_varlen",
         varlen_autocast<c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace warpwright
