// attention_with_kv_cache on every dispatch key. It has no derivative: decoding is inference.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "ops/attention_with_kv_cache/torch/common.h"

namespace warpwright {
namespace {

constexpr const char* kOp = "attention_with_kv_cache";

// ---- output shape and checks ----

void check_kv_attention(const Tensor& query, const KvCacheTensors& cache, int64_t appended) {
  check_kv_tokens(query, "attention_with_kv_cache: query");
  check_kv_cache(kOp, cache, query);
  const c10::SymInt heads = query.sym_size(2), kv_heads = cache.k.sym_size(2);
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, kOp,
              ": query: expected a multiple of k_cache's ", kv_heads, " heads, got ", heads);
  constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;
  TORCH_CHECK(appended >= 0 && appended <= kMaxTokens, kOp, ": appended: expected 0 to ",
              kMaxTokens, ", got ", appended);
}

Tensor empty_output(const Tensor& query) {
  return at::empty_symint(query.sym_sizes(), query.options());
}

// ---- CPU and CUDA ----

template <class Run>
Tensor kv_attention_with(const Tensor& query, const KvCacheTensors& cache, int64_t appended,
                         bool is_causal, std::optional<double> scale, Run&& run) {
  check_kv_attention(query, cache, appended);
  check_has_storage(query, "attention_with_kv_cache: query");
  Tensor output = empty_output(query);
  if (output.numel() == 0) return output;
  const KvLayout layout(kOp, cache, appended);
  const Tensor q = with_adjacent_heads(query);
  const int64_t D = query.size(3);
  run(KvAttentionParams{.dtype = dtype_of(query),
                        .B = query.size(0),
                        .L_q = query.size(1),
                        .H = query.size(2),
                        .H_kv = cache.k.size(2),
                        .D = D,
                        .scale = scale.value_or(1 / std::sqrt(static_cast<double>(D))),
                        .is_causal = is_causal,
                        .query = kv_tokens(q),
                        .k_cache = kv_operand(cache.k, false),
                        .v_cache = kv_operand(cache.v, false),
                        .layout = layout.value,
                        .out = output.mutable_data_ptr()});
  return output;
}

Tensor kv_attention_cpu_kernel(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& cache_seqlens, const OptionalTensor& block_table,
                               int64_t appended, bool is_causal, std::optional<double> scale) {
  const KvCacheTensors cache{k_cache, v_cache, cache_seqlens, value_or_undefined(block_table)};
  return kv_attention_with(query, cache, appended, is_causal, scale, kv_attention_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor kv_attention_cuda_kernel(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                const Tensor& cache_seqlens, const OptionalTensor& block_table,
                                int64_t appended, bool is_causal, std::optional<double> scale) {
  const CudaCall call(query);
  const KvCacheTensors cache{k_cache, v_cache, cache_seqlens, value_or_undefined(block_table)};
  auto run = [&](const KvAttentionParams& p) {
    const KvAttentionPlan plan = choose_kv_attention(p, current_device_info());
    Tensor memory;
    KvAttentionWorkspace workspace;
    if (plan.workspace_bytes() > 0) {
      memory = at::empty({plan.workspace_bytes()}, query.options().dtype(at::kByte));
      auto* bytes = static_cast<char*>(memory.mutable_data_ptr());
      workspace = {.out = bytes, .stats = bytes + plan.out_bytes};
    }
    launch_kv_attention(p, plan, workspace, kv_cache_errors(), call.stream);
    check_kv_strict(call.stream);
  };
  return kv_attention_with(query, cache, appended, is_causal, scale, run);
}
#endif

// ---- Meta ----

Tensor kv_attention_meta(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& cache_seqlens, const OptionalTensor& block_table,
                         int64_t appended, bool, std::optional<double>) {
  check_kv_attention(query, {k_cache, v_cache, cache_seqlens, value_or_undefined(block_table)},
                     appended);
  return empty_output(query);
}

// ---- Autograd ----

Tensor kv_attention_autograd(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& cache_seqlens, const OptionalTensor& block_table,
                             int64_t appended, bool is_causal, std::optional<double> scale) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                     const OptionalTensor&, int64_t, bool, std::optional<double>)>(
          "warpwright::attention_with_kv_cache");
  check_constant(query, kOp, "query");
  check_constant(k_cache, kOp, "k_cache");
  check_constant(v_cache, kOp, "v_cache");
  return below_autograd([&] {
    return op.call(query, k_cache, v_cache, cache_seqlens, block_table, appended, is_causal, scale);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "attention_with_kv_cache(Tensor query, Tensor k_cache, Tensor v_cache, "
      "Tensor cache_seqlens, Tensor? block_table=None, int appended=0, bool is_causal=False, "
      "float? scale=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("attention_with_kv_cache", kv_attention_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("attention_with_kv_cache", kv_attention_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("attention_with_kv_cache", kv_attention_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("attention_with_kv_cache", kv_attention_autograd);
}

}  // namespace warpwright
