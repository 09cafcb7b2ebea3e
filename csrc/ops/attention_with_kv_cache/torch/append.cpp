// kv_cache_append_ on every dispatch key: writes the keys and values of new tokens into the cache.
#include <ATen/MemoryOverlap.h>

#include "ops/attention_with_kv_cache/torch/common.h"

namespace warpwright {
namespace {

constexpr const char* kAppend = "kv_cache_append_";

// ---- checks ----

void check_kv_append(const KvCacheTensors& cache, const Tensor& k, const Tensor& v) {
  check_kv_tokens(k, "kv_cache_append_: k");
  check_kv_cache(kAppend, cache, k);
  TORCH_CHECK(k.sym_size(2) == cache.k.sym_size(2), kAppend, ": k: expected ", cache.k.sym_size(2),
              " heads, as in k_cache, got ", k.sym_size(2));
  check_argument(v, "kv_cache_append_: v", k.sym_sizes(), k.scalar_type(), k);
}

// ---- CPU and CUDA ----

template <class Run>
void kv_append_with(const KvCacheTensors& cache, const Tensor& k, const Tensor& v, Run&& run) {
  check_kv_append(cache, k, v);
  check_has_storage(k, "kv_cache_append_: k");
  check_has_storage(v, "kv_cache_append_: v");
  at::assert_no_internal_overlap(cache.k);
  at::assert_no_internal_overlap(cache.v);
  if (k.numel() == 0) return;
  const KvLayout layout(kAppend, cache, k.size(1));
  const Tensor keys = with_adjacent_heads(k), values = with_adjacent_heads(v);
  run(KvAppendParams{.dtype = dtype_of(k),
                     .B = k.size(0),
                     .L_new = k.size(1),
                     .H_kv = k.size(2),
                     .D = k.size(3),
                     .k = kv_tokens(keys),
                     .v = kv_tokens(values),
                     .k_cache = kv_operand(cache.k, true),
                     .v_cache = kv_operand(cache.v, true),
                     .layout = layout.value});
}

void kv_append_cpu_kernel(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                          const Tensor& v, const Tensor& cache_seqlens,
                          const OptionalTensor& block_table) {
  kv_append_with({k_cache, v_cache, cache_seqlens, value_or_undefined(block_table)}, k, v,
                 kv_append_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
void kv_append_cuda_kernel(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                           const Tensor& v, const Tensor& cache_seqlens,
                           const OptionalTensor& block_table) {
  const CudaCall call(k);
  kv_append_with({k_cache, v_cache, cache_seqlens, value_or_undefined(block_table)}, k, v,
                 [&](const KvAppendParams& p) {
                   launch_kv_append(p, choose_kv_append(p), kv_cache_errors(), call.stream);
                   check_kv_strict(call.stream);
                 });
}
#endif

// ---- Meta ----

void kv_append_meta(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                    const Tensor& cache_seqlens, const OptionalTensor& block_table) {
  check_kv_append({k_cache, v_cache, cache_seqlens, value_or_undefined(block_table)}, k, v);
}

// ---- Autograd ----

void kv_append_autograd(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                        const Tensor& v, const Tensor& cache_seqlens,
                        const OptionalTensor& block_table) {
  static const auto op =
      find_op<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                   const OptionalTensor&)>("warpwright::kv_cache_append_");
  check_constant(k_cache, kAppend, "k_cache");
  check_constant(v_cache, kAppend, "v_cache");
  check_constant(k, kAppend, "k");
  check_constant(v, kAppend, "v");
  below_autograd([&] { op.call(k_cache, v_cache, k, v, cache_seqlens, block_table); });
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    if (!cache->is_inference()) torch::autograd::impl::bump_version(*cache);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "kv_cache_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
      "Tensor cache_seqlens, Tensor? block_table=None) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("kv_cache_append_", kv_append_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("kv_cache_append_", kv_append_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("kv_cache_append_", kv_append_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("kv_cache_append_", kv_append_autograd); }

}  // namespace warpwright
