// Attention of a few new queries over cached keys and values (decoding), without a derivative:
//   out = softmax(scale * q k^T) v
// The cache holds one page per sequence, or pages that a block table lists. Key j of sequence b is
// token j % page_size of page block_table[b, j / page_size].
// The keys of a sequence are split over CTAs. A split stores its output and log-sum-exp, and a
// second kernel merges the splits in order. Memory-bound: K and V are read once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "common/error_record.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// Strides in elements. The elements of a head are adjacent.
struct KvCacheOperand {  // (num_pages, page_size, H_kv, D)
  void* data = nullptr;
  int64_t stride_page = 0, stride_token = 0, stride_head = 0;
};
struct KvTokens {  // (B, tokens, heads, D)
  const void* data = nullptr;
  int64_t stride_b = 0, stride_token = 0, stride_head = 0;
};

// Where the tokens of each sequence are.
struct KvCacheLayout {
  int64_t page_size, num_pages;
  int64_t max_pages;             // per sequence
  const int32_t* block_table;    // (B, max_pages); null: sequence b is page b
  int64_t table_stride;          // elements between the rows of block_table
  const int32_t* cache_seqlens;  // (B): tokens before the call
  int64_t appended;              // tokens that an append has added to each sequence

  constexpr int64_t capacity() const { return page_size * max_pages; }
};

struct KvAttentionParams {
  DType dtype;
  int64_t B, L_q, H, H_kv, D;  // H is a multiple of H_kv; head h uses head h / (H / H_kv) of k, v
  double scale;
  bool is_causal;  // the last query sees all keys, the one before it all but the last, and so on
  KvTokens query;  // (B, L_q, H, D)
  KvCacheOperand k_cache, v_cache;
  KvCacheLayout layout;
  void* out;  // (B, L_q, H, D), contiguous

  constexpr int64_t group() const { return H / H_kv; }
  constexpr int64_t rows() const {
    return L_q * group();
  }  // of queries that share a head of k and v
};

// Writes the tokens of k and v after the first cache_seqlens tokens of each sequence.
struct KvAppendParams {
  DType dtype;
  int64_t B, L_new, H_kv, D;
  KvTokens k, v;  // (B, L_new, H_kv, D)
  KvCacheOperand k_cache, v_cache;
  KvCacheLayout layout;
};

// Where kernels report bad lengths and bad entries of the block table.
struct KvCacheErrors {
  ErrorRecord *lengths, *table;
};

enum class KvAttentionPath : int8_t {
  kFma,  // any type, head dimension and alignment
  kMma,  // mma.sync, sm_80 and later
};

constexpr int64_t kKvMaxHeadSize = 512;
// All splits of a sequence but the last have a multiple of this many keys, so that a short sequence
// fills few of them.
constexpr int64_t kKvSplitKeys = 256;
constexpr int64_t kKvMaxSplits = 128;

struct KvAttentionPlan {
  KvAttentionPath path;
  int head_tile;   // 64, 128 or 256 (kMma), 128, 256 or 512 (kFma): D is padded to it
  int row_tiles;   // of 16 query rows per CTA (kMma)
  int64_t splits;  // of the keys of a sequence, at most
  int64_t out_bytes, stats_bytes;  // of the workspace: the splits' partial results
  const char* reason;

  constexpr int64_t workspace_bytes() const { return out_bytes + stats_bytes; }
};

// Per row (B, H_kv, rows) and split: the output before division (D), and base and sum of the
// softmax (2), in the accumulator's type. Null with one split.
struct KvAttentionWorkspace {
  void *out = nullptr, *stats = nullptr;
};

// The keys per split. A pure function, so that the kernels of a call agree.
constexpr int64_t kv_split_keys(int64_t length, int64_t splits) {
  const int64_t chunks = ceil_div(ceil_div(length, splits), kKvSplitKeys);
  return (chunks > 1 ? chunks : 1) * kKvSplitKeys;
}

// Splits depend on extents alone, because the lengths are on the device. `units` counts the CTAs
// without a split, `resident` those that run at once. Waves of CTAs should be full, and each split
// adds a prologue and a partial result: on an H100 0.6 % of the time of long sequences.
inline int64_t choose_kv_splits(int64_t units, int64_t capacity, int64_t resident) {
  constexpr double kSplitCost = 0.006;
  const int64_t longest = std::max(ceil_div(capacity, kKvSplitKeys), int64_t{1});
  int64_t best = 1;
  double least = 0;
  for (int64_t splits = 1; splits <= std::min(longest, kKvMaxSplits); ++splits) {
    const auto waves = static_cast<double>(ceil_div(units * splits, resident));
    const double time = waves / static_cast<double>(splits) + kSplitCost * waves;
    if (splits == 1 || time < least) best = splits, least = time;
  }
  return best;
}

// The mma.sync kernel: steps of 16 keys in the ring of a warp, and the most bytes of shared memory.
constexpr int kv_stages(int head_tile) { return head_tile == 64 ? 4 : head_tile == 128 ? 3 : 2; }
constexpr int64_t kv_mma_shared_bytes(int head_tile) {
  return int64_t{4} * kv_stages(head_tile) * 2 * 16 * head_tile * 2 + 32 * head_tile * 2;
}

inline KvAttentionPlan choose_kv_attention(const KvAttentionParams& p, const DeviceInfo& device) {
  const int64_t size = dtype_size(p.dtype);
  // Bits below 16 of every address and pitch in bytes.
  uint64_t bits = reinterpret_cast<uintptr_t>(p.query.data) | static_cast<uint64_t>(p.D * size);
  bits |=
      static_cast<uint64_t>((p.query.stride_b | p.query.stride_token | p.query.stride_head) * size);
  for (const KvCacheOperand& cache : {p.k_cache, p.v_cache}) {
    bits |= reinterpret_cast<uintptr_t>(cache.data);
    bits |=
        static_cast<uint64_t>((cache.stride_page | cache.stride_token | cache.stride_head) * size);
  }
  const int mma_tile = p.D <= 64 ? 64 : p.D <= 128 ? 128 : 256;
  const char* obstacle = size != 2             ? "FMA: fp32 and fp64 keep their precision"
                         : p.D > 256           ? "FMA: a head dimension above 256 fits no tile"
                         : bits % 16 != 0      ? "FMA: not all rows begin at a 16-byte boundary"
                         : device.sm_arch < 80 ? "FMA: mma.sync of 16-bit types needs sm_80"
                         : kv_mma_shared_bytes(mma_tile) > device.smem_per_block
                             ? "FMA: shared memory holds no ring of this head dimension"
                             : nullptr;
  KvAttentionPlan plan{
      .path = obstacle ? KvAttentionPath::kFma : KvAttentionPath::kMma,
      .head_tile = obstacle ? (p.D <= 128   ? 128
                               : p.D <= 256 ? 256
                                            : 512)
                            : mma_tile,
      .row_tiles = !obstacle && p.rows() > 16 && mma_tile <= 128 ? 2 : 1,
      .splits = 1,
      .out_bytes = 0,
      .stats_bytes = 0,
      .reason = obstacle ? obstacle : "mma.sync: query heads of a key share its read"};
  const int64_t cta_rows = obstacle ? (p.D <= 128 ? 8 : p.D <= 256 ? 4 : 1) : 16 * plan.row_tiles;
  const int64_t per_sm =
      obstacle ? 4
               : std::clamp<int64_t>(device.smem_per_block / kv_mma_shared_bytes(mma_tile), 1, 3);
  plan.splits = choose_kv_splits(p.B * p.H_kv * ceil_div(p.rows(), cta_rows), p.layout.capacity(),
                                 device.num_sms * per_sm);
  if (plan.splits > 1) {
    const int64_t accumulator = p.dtype == DType::kFloat64 ? 8 : 4;
    const int64_t parts = p.B * p.H_kv * p.rows() * plan.splits;
    plan.out_bytes = ceil_div(parts * p.D * accumulator, int64_t{16}) * 16;
    plan.stats_bytes = parts * 2 * accumulator;
  }
  return plan;
}

struct KvAppendPlan {
  int bytes;  // per access: 16, or an element
  const char* reason;
};

inline KvAppendPlan choose_kv_append(const KvAppendParams& p) {
  const int64_t size = dtype_size(p.dtype);
  uint64_t bits = static_cast<uint64_t>(p.D * size);
  for (const KvTokens& x : {p.k, p.v}) {
    bits |= reinterpret_cast<uintptr_t>(x.data);
    bits |= static_cast<uint64_t>((x.stride_b | x.stride_token | x.stride_head) * size);
  }
  for (const KvCacheOperand& x : {p.k_cache, p.v_cache}) {
    bits |= reinterpret_cast<uintptr_t>(x.data);
    bits |= static_cast<uint64_t>((x.stride_page | x.stride_token | x.stride_head) * size);
  }
  if (bits % 16 == 0) return {16, "every head begins at a 16-byte boundary"};
  return {static_cast<int>(size), "not every head begins at a 16-byte boundary"};
}

inline std::string describe(const KvAttentionPlan& plan) {
  std::string text = plan.reason;
  text += ", head dimension padded to " + std::to_string(plan.head_tile);
  if (plan.splits == 1) return text + ", one CTA per sequence and head of keys";
  return text + ", keys split over at most " + std::to_string(plan.splits) +
         " CTAs, merged in order; " + std::to_string(plan.workspace_bytes()) +
         " bytes for partial results";
}

inline std::string describe(const KvAppendPlan& plan) {
  return "k and v in one launch, " + std::to_string(plan.bytes) +
         " bytes per access: " + plan.reason;
}

// These throw IndexError for a length that the cache cannot hold and for an entry that is no page.
void kv_attention_cpu(const KvAttentionParams& params);
void kv_append_cpu(const KvAppendParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_kv_attention(const KvAttentionParams& params, const KvAttentionPlan& plan,
                         const KvAttentionWorkspace& workspace, const KvCacheErrors& errors,
                         cudaStream_t stream);
void launch_kv_append(const KvAppendParams& params, const KvAppendPlan& plan,
                      const KvCacheErrors& errors, cudaStream_t stream);
#endif

}  // namespace warpwright
