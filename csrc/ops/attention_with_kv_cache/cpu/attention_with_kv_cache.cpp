// Attention over the cache, and appending to it, on the CPU. Each task owns the query rows of one
// head of keys: a first pass over the keys computes scores, a second one sums the values.
#include "ops/attention_with_kv_cache/attention_with_kv_cache.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/types.h"

namespace warpwright {
namespace {

// Throws unless every length fits and every page in use exists.
void check_layout(const KvCacheLayout& layout, int64_t B) {
  for (int64_t b = 0; b < B; ++b) {
    const int64_t before = layout.cache_seqlens[b], length = before + layout.appended;
    TORCH_CHECK_INDEX(before >= 0 && length <= layout.capacity(),
                      "attention_with_kv_cache: cache_seqlens: expected a length from 0 to ",
                      layout.capacity() - layout.appended, ", got ", before, " (sequence ", b, ")");
    if (layout.block_table == nullptr || length == 0) continue;
    for (int64_t i = 0; i < ceil_div(length, layout.page_size); ++i) {
      const int64_t page = layout.block_table[b * layout.table_stride + i];
      TORCH_CHECK_INDEX(page >= 0 && page < layout.num_pages,
                        "attention_with_kv_cache: block_table: expected a page from 0 to ",
                        layout.num_pages - 1, ", got ", page, " (sequence ", b, ", entry ", i, ")");
    }
  }
}

// The offset of key `key` of sequence b in elements, without its head.
int64_t token_offset(const KvCacheLayout& layout, const KvCacheOperand& cache, int64_t b,
                     int64_t key) {
  const bool paged = layout.block_table != nullptr;
  const int64_t index = paged ? key / layout.page_size : 0;
  const int64_t page = paged ? layout.block_table[b * layout.table_stride + index] : b;
  return page * cache.stride_page + (key - index * layout.page_size) * cache.stride_token;
}

constexpr int64_t kLanes = 32;  // partial sums that the compiler keeps in vectors
// Values of so many keys are summed apart, for shorter chains of roundings.
constexpr int64_t kKeyRun = 32;

template <class A>
A dot(const A* x, const A* y, int64_t count) {
  A sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  }
  for (; i < count; ++i) sums[i % kLanes] += x[i] * y[i];
  A sum = 0;
  for (const A lane : sums) sum += lane;
  return sum;
}

template <class A>
void add_scaled(A factor, const A* __restrict__ x, A* __restrict__ sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += factor * x[i];
}

// Turns the scores of a row into probabilities. Keys from `visible` on get 0.
template <class A>
void softmax(A* scores, int64_t visible, int64_t length) {
  A largest = -std::numeric_limits<A>::infinity();
  for (int64_t j = 0; j < visible; ++j) largest = std::max(largest, scores[j]);
  const A base = std::isinf(largest) && largest < 0 ? A(0) : largest;
  double sum = 0;
  for (int64_t j = 0; j < visible; ++j) sum += scores[j] = std::exp(scores[j] - base);
  const A inverse = sum == 0 ? A(0) : static_cast<A>(1 / sum);
  for (int64_t j = 0; j < visible; ++j) scores[j] *= inverse;
  std::fill(scores + visible, scores + length, A(0));
}

// The buffers of a thread.
template <class A>
struct KvBuffers {
  std::vector<A> query, scores, out, part, token;
};

// All query rows that share head h_kv of sequence b.
template <class T>
void attend(const KvAttentionParams& p, int64_t b, int64_t h_kv,
            KvBuffers<CpuCompute<T>>& buffers) {
  using A = CpuCompute<T>;
  const int64_t rows = p.rows(), group = p.group(), D = p.D;
  const int64_t length = p.layout.cache_seqlens[b] + p.layout.appended;
  buffers.query.resize(static_cast<size_t>(rows * D));
  buffers.scores.resize(static_cast<size_t>(rows * length));
  buffers.out.assign(static_cast<size_t>(rows * D), A(0));
  buffers.part.resize(static_cast<size_t>(rows * D));
  buffers.token.resize(static_cast<size_t>(D));
  auto [query, scores, out, part, token] =
      std::tuple(buffers.query.data(), buffers.scores.data(), buffers.out.data(),
                 buffers.part.data(), buffers.token.data());
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = static_cast<const T*>(p.query.data) + b * p.query.stride_b +
                    r / group * p.query.stride_token +
                    (h_kv * group + r % group) * p.query.stride_head;
    for (int64_t d = 0; d < D; ++d) query[r * D + d] = static_cast<A>(from[d]);
  }
  auto widen = [&](const KvCacheOperand& cache, int64_t key) {
    const T* from = static_cast<const T*>(cache.data) + token_offset(p.layout, cache, b, key) +
                    h_kv * cache.stride_head;
    for (int64_t d = 0; d < D; ++d) token[d] = static_cast<A>(from[d]);
  };
  for (int64_t key = 0; key < length; ++key) {
    widen(p.k_cache, key);
    for (int64_t r = 0; r < rows; ++r)
      scores[r * length + key] = dot(query + r * D, token, D) * static_cast<A>(p.scale);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t hidden = p.is_causal ? p.L_q - 1 - r / group : 0;
    softmax(scores + r * length, std::max(length - hidden, int64_t{0}), length);
  }
  for (int64_t first = 0; first < length; first += kKeyRun) {
    std::fill(part, part + rows * D, A(0));
    for (int64_t key = first; key < std::min(first + kKeyRun, length); ++key) {
      widen(p.v_cache, key);
      for (int64_t r = 0; r < rows; ++r)
        add_scaled(scores[r * length + key], token, part + r * D, D);
    }
    add_scaled(A(1), part, out, rows * D);
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* to = static_cast<T*>(p.out) + ((b * p.L_q + r / group) * p.H + h_kv * group + r % group) * D;
    for (int64_t d = 0; d < D; ++d) to[d] = static_cast<T>(out[r * D + d]);
  }
}

}  // namespace

void kv_attention_cpu(const KvAttentionParams& p) {
  check_layout(p.layout, p.B);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const int64_t steps = p.rows() * p.layout.capacity() * p.D;
    at::parallel_for(0, p.B * p.H_kv, grain(steps), [&](int64_t begin, int64_t end) {
      KvBuffers<CpuCompute<T>> buffers;
      for (int64_t i = begin; i < end; ++i) attend<T>(p, i / p.H_kv, i % p.H_kv, buffers);
    });
  });
}

void kv_append_cpu(const KvAppendParams& p) {
  check_layout(p.layout, p.B);
  const int64_t element = dtype_size(p.dtype);
  auto copy = [&](const KvTokens& from, const KvCacheOperand& to, int64_t b, int64_t token) {
    const int64_t key = p.layout.cache_seqlens[b] + token;
    for (int64_t h = 0; h < p.H_kv; ++h) {
      const int64_t source = b * from.stride_b + token * from.stride_token + h * from.stride_head;
      const int64_t target = token_offset(p.layout, to, b, key) + h * to.stride_head;
      std::memcpy(static_cast<char*>(to.data) + target * element,
                  static_cast<const char*>(from.data) + source * element,
                  static_cast<size_t>(p.D * element));
    }
  };
  // In order, so that of two sequences that share a page the later one's tokens remain.
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t token = 0; token < p.L_new; ++token) {
      copy(p.k, p.k_cache, b, token);
      copy(p.v, p.v_cache, b, token);
    }
  }
}

}  // namespace warpwright
