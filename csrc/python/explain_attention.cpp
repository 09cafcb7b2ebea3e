// explain() of attention: scaled_dot_product_attention, attention_varlen, attention_with_kv_cache.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include "ops/attention/attention.h"
#include "ops/attention/varlen.h"
#include "ops/attention_with_kv_cache/attention_with_kv_cache.h"
#include "python/explain.h"

namespace py = pybind11;

namespace warpwright {
namespace {

// ---- scaled_dot_product_attention ----

// The operand folded to (B, H, S, D), as the op does it. Ranks other than 4 are taken as
// contiguous.
AttentionOperand attention_operand(const TensorLayout& x) {
  const size_t dims = x.sizes.size();
  const int64_t cols = x.sizes[dims - 1], rows = x.sizes[dims - 2];
  const bool as_it_lies = dims == 4 && x.strides[3] == 1;
  AttentionOperand operand{reinterpret_cast<void*>(x.address), rows * cols, rows * cols, cols};
  if (as_it_lies) operand = {operand.data, x.strides[0], x.strides[1], x.strides[2]};
  return operand;
}

// Strides over (B, H, S_q, S_k), 0 where the mask broadcasts.
void set_attention_mask(AttentionParams& p, const std::string& dtype, const TensorLayout& mask) {
  p.mask_type = dtype == "bool"                ? MaskType::kBool
                : dtype_from(dtype) == p.dtype ? MaskType::kElement
                                               : MaskType::kFloat32;
  p.mask = reinterpret_cast<const void*>(mask.address);
  const size_t dims = std::min<size_t>(mask.sizes.size(), 4), skipped = mask.sizes.size() - dims;
  for (size_t i = 0; i < dims; ++i) {
    const size_t to = 4 - dims + i;
    p.mask_full[to] = mask.sizes[skipped + i] != 1;
    p.mask_stride[to] = p.mask_full[to] ? mask.strides[skipped + i] : 0;
  }
}

Lines explain_scaled_dot_product_attention(const std::string& dtype, const TensorLayout& query,
                                           const TensorLayout& key, const TensorLayout& value,
                                           double scale, const std::string& mask_dtype,
                                           const TensorLayout& mask, bool mask_needs_grad,
                                           bool dropout, bool is_causal,
                                           std::pair<int64_t, int64_t> window, double softcap,
                                           const DeviceInfo& device, bool sm90) {
  auto extent = [](const TensorLayout& x, size_t from_end) {
    return x.sizes.size() >= from_end ? x.sizes[x.sizes.size() - from_end] : 1;
  };
  AttentionBackwardParams backward{};
  AttentionParams& p = backward.fwd;
  p.dtype = dtype_from(dtype);
  p.H = extent(query, 3), p.H_kv = extent(key, 3);
  p.S_q = extent(query, 2), p.S_k = extent(key, 2);
  p.D = extent(query, 1), p.D_v = extent(value, 1);
  p.B = numel(query) / std::max<int64_t>(1, p.H * p.S_q * p.D);
  p.q = attention_operand(query), p.k = attention_operand(key), p.v = attention_operand(value);
  // Results that the op allocates are dense. All gradients are wanted: their addresses are not
  // null.
  auto dense = [](uintptr_t address, int64_t H, int64_t S, int64_t D) -> AttentionOperand {
    return {reinterpret_cast<void*>(address), H * S * D, S * D, D};
  };
  constexpr uintptr_t kAligned = 256;
  p.out = backward.dout = dense(0, p.H, p.S_q, p.D_v);
  backward.dq = dense(kAligned, p.H, p.S_q, p.D);
  backward.dk = dense(kAligned, p.H_kv, p.S_k, p.D);
  backward.dv = dense(kAligned, p.H_kv, p.S_k, p.D_v);
  p.is_causal = is_causal;
  auto limit = [](int64_t side) { return side < 0 ? kUnlimited : side; };
  set_window(p, limit(window.first), limit(window.second));
  p.softcap = softcap;
  p.scale = scale;
  if (!mask_dtype.empty()) set_attention_mask(p, mask_dtype, mask);
  if (mask_needs_grad) backward.dmask = reinterpret_cast<void*>(kAligned);
  p.dropout_p = dropout ? 0.5 : 0;
  const bool available = sm90 && device.sm_arch == 90;
  const AttentionPlan forward = choose_attention(p, device, available);
  const AttentionBackwardPlan gradients = choose_attention_backward(backward, device, available);
  Lines lines;
  if (forward.workspace.mask.bytes > 0) lines.push_back({"mask", describe(forward.mask)});
  lines.push_back({"forward", describe(forward)});
  lines.push_back({"backward", describe(gradients)});
  if (gradients.gangs.width > 0)
    lines.push_back({"backward workspace", describe(gradients.workspace)});
  if (mask_needs_grad && gradients.path != AttentionPath::kSm90)
    lines.push_back({"gradient of attn_mask", "FMA"});
  return lines;
}

// ---- attention_varlen ----

Lines explain_attention_varlen(const std::string& dtype, const TensorLayout& query,
                               const TensorLayout& key, const TensorLayout& value,
                               int64_t sequences, std::pair<int64_t, int64_t> max_lengths,
                               double scale, bool is_causal, std::pair<int64_t, int64_t> window,
                               double softcap, const DeviceInfo& device, bool sm90) {
  AttentionBackwardParams b{};
  AttentionParams& p = b.fwd;
  p.dtype = dtype_from(dtype);
  p.B = 1, p.H = query.sizes.at(1), p.H_kv = std::max(key.sizes.at(1), int64_t{1});
  p.S_q = query.sizes.at(0), p.S_k = key.sizes.at(0);
  p.D = query.sizes.at(2), p.D_v = value.sizes.at(2);
  p.scale = scale, p.is_causal = is_causal, p.softcap = softcap;
  auto limit = [](int64_t side) { return side < 0 ? kUnlimited : side; };
  set_packed_window(p, limit(window.first), limit(window.second));
  auto operand = [](const TensorLayout& x) -> AttentionOperand {
    const bool as_it_lies = x.strides.at(2) == 1;  // else the op copies it
    return {reinterpret_cast<void*>(x.address), 0, as_it_lies ? x.strides.at(1) : x.sizes.at(2),
            as_it_lies ? x.strides.at(0) : x.sizes.at(1) * x.sizes.at(2)};
  };
  // Results that the op allocates are dense, and all gradients are wanted.
  auto dense = [](int64_t heads, int64_t width) -> AttentionOperand {
    constexpr uintptr_t kAligned = 256;
    return {reinterpret_cast<void*>(kAligned), 0, width, heads * width};
  };
  p.q = operand(query), p.k = operand(key), p.v = operand(value);
  p.out = b.dout = dense(p.H, p.D_v);
  b.dq = dense(p.H, p.D), b.dk = dense(p.H_kv, p.D), b.dv = dense(p.H_kv, p.D_v);
  const PackedSequences packed{nullptr, nullptr, sequences, max_lengths.first, max_lengths.second};
  const bool available = sm90 && device.sm_arch == 90;
  const VarlenPlan forward = choose_varlen(p, packed, nullptr, device, available);
  const VarlenPlan backward = choose_varlen(p, packed, &b, device, available);
  return {{"tiles", "one kernel lists them from cu_seqlens, sequences with the most work first"},
          {"forward", describe(forward)},
          {"backward", describe(backward)}};
}

// ---- attention_with_kv_cache ----

// The tokens (B, tokens, heads, D) of an append. The op copies them if heads are not dense.
KvTokens new_tokens(const TensorLayout& x) {
  const int64_t L = x.sizes.at(1), H = x.sizes.at(2), D = x.sizes.at(3);
  const auto* data = reinterpret_cast<const void*>(x.address);
  if (D > 1 && x.strides.at(3) != 1) return {nullptr, L * H * D, H * D, D};
  return {data, x.strides.at(0), x.strides.at(1), x.strides.at(2)};
}
KvAppendParams append_params(const KvAttentionParams& p, const TensorLayout& k,
                             const TensorLayout& v) {
  return {.dtype = p.dtype,
          .B = p.B,
          .L_new = k.sizes.at(1),
          .H_kv = p.H_kv,
          .D = p.D,
          .k = new_tokens(k),
          .v = new_tokens(v),
          .k_cache = p.k_cache,
          .v_cache = p.v_cache,
          .layout = p.layout};
}

// added: the new tokens of k and v, or none.
Lines explain_attention_with_kv_cache(const std::string& dtype, const TensorLayout& query,
                                      const TensorLayout& k_cache, const TensorLayout& v_cache,
                                      const std::vector<TensorLayout>& added, int64_t max_pages,
                                      const DeviceInfo& device) {
  auto cache = [](const TensorLayout& x) {
    auto* data = reinterpret_cast<void*>(x.address);
    return KvCacheOperand{data, x.strides.at(0), x.strides.at(1), x.strides.at(2)};
  };
  KvAttentionParams p{};
  p.dtype = dtype_from(dtype);
  p.B = query.sizes.at(0);
  p.L_q = query.sizes.at(1);
  p.H = query.sizes.at(2);
  p.D = query.sizes.at(3);
  p.H_kv = std::max(k_cache.sizes.at(2), int64_t{1});
  p.query = {reinterpret_cast<const void*>(query.address), query.strides.at(0), query.strides.at(1),
             query.strides.at(2)};
  p.k_cache = cache(k_cache);
  p.v_cache = cache(v_cache);
  p.layout.page_size = k_cache.sizes.at(1);
  p.layout.max_pages = max_pages;
  const KvAttentionPlan plan = choose_kv_attention(p, device);
  Lines lines;
  if (added.size() == 2 && numel(added[0]) > 0)
    lines.push_back({"append", describe(choose_kv_append(append_params(p, added[0], added[1])))});
  lines.push_back({"forward", describe(plan)});
  if (plan.splits > 1) lines.push_back({"merge", "the splits of each query row, in order"});
  return lines;
}

}  // namespace

void define_explain_attention(py::module_& m) {
  m.def("explain_scaled_dot_product_attention", &explain_scaled_dot_product_attention);
  m.def("explain_attention_varlen", &explain_attention_varlen);
  m.def("explain_attention_with_kv_cache", &explain_attention_with_kv_cache);
}

}  // namespace warpwright
