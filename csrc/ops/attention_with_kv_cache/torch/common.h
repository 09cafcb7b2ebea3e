// Shared by the files of torch/: checks of the cache, and the cache as the kernels see it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/attention_with_kv_cache/attention_with_kv_cache.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/error_word.h"
#include "torch/cuda.h"
#endif

namespace warpwright {

// The arguments that say where the tokens are.
struct KvCacheTensors {
  const Tensor &k, &v, &seqlens;
  const Tensor block_table;  // undefined: sequence b is k[b], v[b]
};

// (batch, tokens, heads, D) of query, k or v.
inline void check_kv_tokens(const Tensor& tokens, const char* name) {
  TORCH_CHECK(tokens.dim() == 4, name, ": expected (batch, tokens, heads, head size), got shape ",
              tokens.sym_sizes());
}

// `like` is the query, or the new keys: its batch and head size are the call's.
inline void check_kv_cache(const std::string& op, const KvCacheTensors& cache, const Tensor& like) {
  const auto named = [&](const char* argument) { return op + ": " + argument; };
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(like.scalar_type()), op,
                              ": expected real floating-point tensors, got ", like.scalar_type());
  const c10::SymInt batch = like.sym_size(0), head_size = like.sym_size(3);
  TORCH_CHECK(cache.k.dim() == 4, op,
              ": k_cache: expected (pages or batch, tokens, heads, head size), got shape ",
              cache.k.sym_sizes());
  TORCH_CHECK(cache.k.sym_size(3) == head_size, op, ": k_cache: expected head size ", head_size,
              ", got ", cache.k.sym_size(3));
  TORCH_CHECK(head_size >= 1 && head_size <= kKvMaxHeadSize, op,
              ": k_cache: expected a head size from 1 to ", kKvMaxHeadSize, ", got ", head_size);
  TORCH_CHECK(cache.k.scalar_type() == like.scalar_type(), op, ": k_cache: expected ",
              like.scalar_type(), ", got ", cache.k.scalar_type());
  check_same_device(cache.k, like, named("k_cache").c_str());
  check_argument(cache.v, named("v_cache").c_str(), cache.k.sym_sizes(), like.scalar_type(), like);
  for (const auto& [tensor, name] : {std::pair(&cache.k, "k_cache"), {&cache.v, "v_cache"}}) {
    TORCH_CHECK(head_size == 1 || tensor->sym_stride(3) == 1, op, ": ", name,
                ": expected adjacent elements in the last dimension, got strides ",
                tensor->sym_strides());
  }
  check_argument(cache.seqlens, named("cache_seqlens").c_str(), {batch}, at::kInt, like);
  c10::SymInt pages = 1;
  if (cache.block_table.defined()) {
    TORCH_CHECK(cache.block_table.dim() == 2 && cache.block_table.sym_size(0) == batch, op,
                ": block_table: expected shape (", batch, ", pages per sequence), got ",
                cache.block_table.sym_sizes());
    check_argument(cache.block_table, named("block_table").c_str(), cache.block_table.sym_sizes(),
                   at::kInt, like);
    pages = cache.block_table.sym_size(1);
  } else {
    TORCH_CHECK(cache.k.sym_size(0) == batch, op, ": k_cache: expected ", batch,
                " sequences, as without a block_table, got ", cache.k.sym_size(0));
  }
  constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;
  TORCH_CHECK(cache.k.sym_size(0) <= kMaxTokens && cache.k.sym_size(1) <= kMaxTokens &&
                  pages <= kMaxTokens && cache.k.sym_size(1) * pages <= kMaxTokens,
              op, ": k_cache: expected at most 2^31 - 1 tokens per sequence, got ",
              cache.k.sym_size(1), " in each of ", pages, " pages");
}

inline KvTokens kv_tokens(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

// With the elements of a head adjacent. These tensors are small next to the cache.
inline Tensor with_adjacent_heads(const Tensor& x) {
  return x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous();
}

// The cache for a kernel that writes it, or only reads it.
inline KvCacheOperand kv_operand(const Tensor& x, bool is_written) {
  void* data = is_written ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr());
  return {data, x.stride(0), x.stride(1), x.stride(2)};
}

// Keeps the tensors that the layout points into.
struct KvLayout {
  Tensor seqlens, table;
  KvCacheLayout value;

  KvLayout(const std::string& op, const KvCacheTensors& cache, int64_t appended)
      : table(cache.block_table) {
    check_has_storage(cache.k, (op + ": k_cache").c_str());
    check_has_storage(cache.v, (op + ": v_cache").c_str());
    check_has_storage(cache.seqlens, (op + ": cache_seqlens").c_str());
    check_has_storage(cache.block_table, (op + ": block_table").c_str());
    seqlens = cache.seqlens.contiguous();
    if (table.defined() && table.size(1) > 1 && table.stride(1) != 1) table = table.contiguous();
    const bool paged = table.defined();
    // An empty table has no address, but is one.
    static constexpr int32_t kEmpty[1] = {};
    const int32_t* entries = !paged              ? nullptr
                             : table.numel() > 0 ? table.const_data_ptr<int32_t>()
                                                 : kEmpty;
    value = {.page_size = cache.k.size(1),
             .num_pages = cache.k.size(0),
             .max_pages = paged ? table.size(1) : 1,
             .block_table = entries,
             .table_stride = paged ? table.stride(0) : 0,
             .cache_seqlens = seqlens.const_data_ptr<int32_t>(),
             .appended = appended};
  }
};

#ifdef WARPWRIGHT_WITH_CUDA
inline KvCacheErrors kv_cache_errors() {
  return {error_record(ErrorSource::kKvCacheLength), error_record(ErrorSource::kKvCacheTable)};
}

inline void check_kv_strict(cudaStream_t stream) {
  const auto error = check_strict(stream);
  TORCH_CHECK_INDEX(!error.has_value(), error.value_or(""));
}
#endif

}  // namespace warpwright
