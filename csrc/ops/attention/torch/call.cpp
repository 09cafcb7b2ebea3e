// scaled_dot_product_attention as users call it: broadcasting, grouped queries, any rank, autocast
// -> attention on (B, H, S, D).
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>

#include <algorithm>

#include "ops/attention/torch/common.h"
#include "torch/check_argument.h"

namespace warpwright {
namespace {

using SymSizes = std::vector<c10::SymInt>;

SymSizes concat(c10::SymIntArrayRef lead, std::initializer_list<c10::SymInt> tail) {
  SymSizes sizes(lead.begin(), lead.end());
  sizes.insert(sizes.end(), tail);
  return sizes;
}

SymSizes batch_sizes(const Tensor& tensor, int64_t inner_dims) {
  const auto sizes = tensor.sym_sizes();
  const int64_t dims = std::max<int64_t>(0, tensor.dim() - inner_dims);
  return SymSizes(sizes.begin(), sizes.begin() + dims);
}

c10::SymInt heads_of(const Tensor& tensor) {
  return tensor.dim() >= 3 ? tensor.sym_size(-3) : c10::SymInt(1);
}

// (B1, B2, ..., H, S, D) with `batch` = (B1, B2, ...) -> (B1 * B2 * ..., H, S, D), as a view if
// possible.
Tensor to_four_dims(const Tensor& tensor, const SymSizes& batch, const c10::SymInt& heads) {
  const Tensor expanded =
      tensor.expand_symint(concat(batch, {heads, tensor.sym_size(-2), tensor.sym_size(-1)}));
  if (batch.size() == 1) return expanded;
  if (batch.empty()) return expanded.unsqueeze(0);
  return expanded.reshape_symint(
      concat({c10::multiply_integers(batch)}, {heads, tensor.sym_size(-2), tensor.sym_size(-1)}));
}

// Raises native's message if the mask does not broadcast to the scores. Returns the mask as (B|1,
// H|1, S_q|1, S_k|1).
Tensor mask_to_four_dims(const Tensor& attn_mask, const SymSizes& scores, const SymSizes& batch) {
  const SymSizes broadcast = at::infer_size_symint(scores, attn_mask.sym_sizes());
  TORCH_CHECK(c10::SymIntArrayRef(broadcast) == c10::SymIntArrayRef(scores), "output with shape ",
              c10::SymIntArrayRef(scores), " doesn't match the broadcast shape ",
              c10::SymIntArrayRef(broadcast));
  Tensor mask = attn_mask;
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  if (mask.dim() == 4) {
    const bool flat = batch.size() <= 1 || mask.sym_size(0) == 1;
    if (flat) return mask;
  }
  return to_four_dims(mask, batch, mask.sym_size(-3));
}

// Query head h uses head h / repeat, as with native's repeat_interleave.
Tensor repeat_heads(const Tensor& tensor, const c10::SymInt& heads) {
  const c10::SymInt repeat = heads / tensor.sym_size(1);
  const auto b = tensor.sym_size(0), h = tensor.sym_size(1);
  const auto s = tensor.sym_size(2), d = tensor.sym_size(3);
  return tensor.unsqueeze(2).expand_symint({b, h, repeat, s, d}).reshape_symint({b, heads, s, d});
}

// out, and the log-sum-exp of each row.
std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const OptionalTensor& attn_mask,
                                  const AttentionAttributes& attributes, bool enable_gqa) {
  Tensor mask = value_or_undefined(attn_mask);
  check_attention_operands(query, key, value, mask, attributes.dropout_p);
  check_plain_storage(query, "scaled_dot_product_attention: query");
  check_plain_storage(key, "scaled_dot_product_attention: key");
  check_plain_storage(value, "scaled_dot_product_attention: value");
  check_plain_storage(mask, "scaled_dot_product_attention: attn_mask");

  c10::SymInt heads, kv_heads;
  SymSizes batch;  // without the heads
  Tensor q = query, k = key, v = value;
  if (enable_gqa) {
    const c10::SymInt q_heads = query.sym_size(-3), k_heads = key.sym_size(-3),
                      v_heads = value.sym_size(-3);
    auto divides = [&](const c10::SymInt& h) {
      return h == q_heads || (h != 0 && q_heads != 0 && q_heads % h == 0);
    };
    TORCH_CHECK(divides(k_heads) && divides(v_heads),
                "Number of heads in key and value must divide the number of heads in query, got "
                "key ",
                k_heads, ", value ", v_heads, ", query ", q_heads);
    heads = q_heads;
    kv_heads = k_heads == v_heads ? k_heads : q_heads;
    batch = at::infer_size_symint(at::infer_size_symint(batch_sizes(query, 3), batch_sizes(key, 3)),
                                  batch_sizes(value, 3));
    q = to_four_dims(q, batch, q_heads);
    k = to_four_dims(k, batch, k_heads);
    v = to_four_dims(v, batch, v_heads);
    if (k_heads != v_heads) {
      k = repeat_heads(k, heads);
      v = repeat_heads(v, heads);
    }
  } else {
    SymSizes lead = at::infer_size_symint(
        at::infer_size_symint(batch_sizes(query, 2), batch_sizes(key, 2)), batch_sizes(value, 2));
    heads = lead.empty() ? c10::SymInt(1) : lead.back();
    if (!lead.empty()) lead.pop_back();
    batch = std::move(lead);
    // One shared head of keys and values stays one head: no copy per query head.
    kv_heads = heads_of(key) == 1 && heads_of(value) == 1 ? c10::SymInt(1) : heads;
    q = to_four_dims(q, batch, heads);
    k = to_four_dims(k, batch, kv_heads);
    v = to_four_dims(v, batch, kv_heads);
  }

  const int64_t rank = std::max({query.dim(), key.dim(), value.dim()});
  SymSizes lead = batch;
  if (rank > 2) lead.push_back(heads);
  if (mask.defined()) {
    mask = mask_to_four_dims(mask, concat(lead, {query.sym_size(-2), key.sym_size(-2)}), batch);
  }
  const auto [out, lse, philox_state] =
      call::attention(q, k, v, optional_if_defined(mask), attributes);
  if (rank == 4) return {out, lse};
  return {out.reshape_symint(concat(lead, {query.sym_size(-2), value.sym_size(-1)})),
          lse.reshape_symint(concat(lead, {query.sym_size(-2)}))};
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p,
                                    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return std::get<0>(
      attend(query, key, value, attn_mask, {dropout_p, is_causal, scale}, enable_gqa));
}

Tensor scaled_dot_product_attention_extras(const Tensor& query, const Tensor& key,
                                           const Tensor& value, const OptionalTensor& attn_mask,
                                           double dropout_p, bool is_causal,
                                           std::optional<double> scale, bool enable_gqa,
                                           OptionalInt window_left, OptionalInt window_right,
                                           double softcap) {
  check_softcap("scaled_dot_product_attention", softcap);
  return std::get<0>(attend(query, key, value, attn_mask,
                            {dropout_p, is_causal, scale, window_left, window_right, softcap},
                            enable_gqa));
}

std::tuple<Tensor, Tensor> scaled_dot_product_attention_lse(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
    OptionalInt window_left, OptionalInt window_right, double softcap) {
  check_softcap("scaled_dot_product_attention", softcap);
  auto [out, lse] =
      attend(query, key, value, attn_mask,
             {dropout_p, is_causal, scale, window_left, window_right, softcap}, enable_gqa);
  return {out, query.scalar_type() == at::kDouble ? lse : lse.to(at::kFloat)};
}

// ---- Autocast ----

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor scaled_dot_product_attention_autocast(const Tensor& query, const Tensor& key,
                                             const Tensor& value, const OptionalTensor& attn_mask,
                                             double dropout_p, bool is_causal,
                                             std::optional<double> scale, bool enable_gqa) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  return call::scaled_dot_product_attention(at::autocast::cached_cast(type, query, kDevice),
                                            at::autocast::cached_cast(type, key, kDevice),
                                            at::autocast::cached_cast(type, value, kDevice),
                                            at::autocast::cached_cast(type, attn_mask, kDevice),
                                            {dropout_p, is_causal, scale}, enable_gqa);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor scaled_dot_product_attention_extras_autocast(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
    OptionalInt window_left, OptionalInt window_right, double softcap) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  auto cast = [&](const auto& t) { return at::autocast::cached_cast(type, t, kDevice); };
  return call::scaled_dot_product_attention_extras(
      cast(query), cast(key), cast(value), cast(attn_mask),
      {dropout_p, is_causal, scale, window_left, window_right, softcap}, enable_gqa);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::tuple<Tensor, Tensor> scaled_dot_product_attention_lse_autocast(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
    OptionalInt window_left, OptionalInt window_right, double softcap) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  auto cast = [&](const auto& t) { return at::autocast::cached_cast(type, t, kDevice); };
  return scaled_dot_product_attention_lse(cast(query), cast(key), cast(value), cast(attn_mask),
                                          dropout_p, is_causal, scale, enable_gqa, window_left,
                                          window_right, softcap);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.impl("scaled_dot_product_attention",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                         TORCH_FN(scaled_dot_product_attention)));
  m.def(
      "scaled_dot_product_attention_extras(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False, int? window_left=None, int? window_right=None, float softcap=0.0) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.impl("scaled_dot_product_attention_extras",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                         TORCH_FN(scaled_dot_product_attention_extras)));
  m.def(
      "scaled_dot_product_attention_lse(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False, int? window_left=None, int? window_right=None, float softcap=0.0) "
      "-> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.impl("scaled_dot_product_attention_lse",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                         TORCH_FN(scaled_dot_product_attention_lse)));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl(
      "scaled_dot_product_attention",
      scaled_dot_product_attention_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>);
  m.impl("scaled_dot_product_attention_extras",
         scaled_dot_product_attention_extras_autocast<c10::DeviceType::CPU,
                                                      c10::DispatchKey::AutocastCPU>);
  m.impl("scaled_dot_product_attention_lse",
         scaled_dot_product_attention_lse_autocast<c10::DeviceType::CPU,
                                                   c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl(
      "scaled_dot_product_attention",
      scaled_dot_product_attention_autocast<c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA>);
  m.impl("scaled_dot_product_attention_extras",
         scaled_dot_product_attention_extras_autocast<c10::DeviceType::CUDA,
                                                      c10::DispatchKey::AutocastCUDA>);
  m.impl("scaled_dot_product_attention_lse",
         scaled_dot_product_attention_lse_autocast<c10::DeviceType::CUDA,
                                                   c10::DispatchKey::AutocastCUDA>);
}

}  // namespace warpwright
