// softmax: y = exp(x - max) / sum(exp(x - max)) along one dimension, and log_softmax, its
// logarithm. Memory-bound. A group of threads holds a row (the dimension is contiguous), or a block
// holds columns (it is not): one read and one write. The backward reads y and dy once:
//   softmax:      dx = y (dy - sum(y dy))
//   log_softmax:  dx = dy - exp(y) sum(dy)
// Rows and columns that do not fit are read twice, the second time mostly from L2. Bytes (E = bytes
// of x, O of y): E + O forward, 2 O + E backward.
//
// Layout: (outer, length, inner), dense. The result has the input's type, or float32 next to 16
// bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"
#include "common/row_ring.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct SoftmaxShape {
  DType dtype;         // of the input and its gradient
  DType output_dtype;  // the same, or float32 next to 16 bits
  bool is_log;
  int64_t outer = 1, length = 1, inner = 1;
};

struct SoftmaxParams : SoftmaxShape {
  const void* input;
  void* output;
};

struct SoftmaxBackwardParams : SoftmaxShape {
  const void* grad_output;
  const void* output;
  void* grad_input;
};

enum class SoftmaxForm {
  kPersistent,     // rows: persistent blocks, whose groups walk rows through a ring
  kHeld,           // rows: a group holds its row in registers
  kStaged,         // rows: a block reads its row twice, the second time from shared memory
  kLooped,         // rows: a block reads its row twice
  kColumns,        // a block holds columns in registers
  kLoopedColumns,  // a block reads its columns twice
};

struct SoftmaxPlan {
  SoftmaxForm form;
  int vec;      // elements per access
  int vectors;  // per thread and operand
  int lanes;    // threads per row, or vectors of columns per block
  int threads;  // per block
  int64_t blocks;
  const char* reason;
};

constexpr int kSoftmaxThreads = 512;          // per block of long rows
constexpr int kSoftmaxStagedThreads = 1024;   // two blocks per SM
constexpr int kSoftmaxHeldThreads = 256;      // per block of short rows
constexpr int kSoftmaxElements = 8;           // held per thread, for accesses of one element
constexpr int64_t kSoftmaxHeldLength = 1024;  // of rows of element accesses
constexpr int kSoftmaxColumnRows = 8;         // held per thread, over all operands
constexpr int64_t kSoftmaxColumnBytes = 128;  // across a block of columns, at least
constexpr int kSoftmaxRowsPerSm = 4;          // blocks of kSoftmaxThreads

// Threads per row if each has at most `held` vectors: a power of two up to a warp, or whole warps.
constexpr int64_t softmax_lanes(int64_t vectors, int held) {
  const int64_t lanes = ceil_div(vectors, int64_t{held});
  if (lanes > 32) return ceil_div(lanes, int64_t{32}) * 32;
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(lanes)));
}

// Whether the forward keeps a row of `bytes` in shared memory for the second read: if two rows fit
// an SM, and the rows that all blocks have in hand, with their results, exceed L2.
inline bool is_softmax_row_staged(const SoftmaxShape& p, int64_t bytes, const DeviceInfo& device) {
  const int64_t output_bytes = p.length * dtype_size(p.output_dtype);
  const int64_t rows = std::min(p.outer, int64_t{kSoftmaxRowsPerSm} * device.num_sms);
  return 2 * (bytes + kMeetingBytes) <= device.smem_per_block &&
         rows * (bytes + output_bytes) > device.l2_bytes;
}

// `operands` rows that are read, of elements of `size` bytes.
inline SoftmaxPlan choose_softmax_rows(const SoftmaxShape& p, int64_t size, int operands,
                                       bool is_aligned, const DeviceInfo& device) {
  SoftmaxPlan plan{};
  const int64_t vec = 16 / size;
  plan.vec = static_cast<int>(vec);
  const int64_t vectors = p.length / vec;
  const int most = operands == 1 ? 8 : 4;
  if (is_aligned && p.length % vec == 0 && vectors <= int64_t{most} * ring_threads(device)) {
    plan.form = SoftmaxForm::kPersistent;
    // Long rows take many vectors per thread, so that few threads meet.
    plan.vectors = vectors > 1 ? 2 : 1;
    while (plan.vectors < most && vectors >= int64_t{plan.vectors} * 32) plan.vectors *= 2;
    plan.lanes = static_cast<int>(softmax_lanes(vectors, plan.vectors));
    const int64_t rows_per_sm = ceil_div(p.outer, int64_t{device.num_sms});
    int64_t groups =
        std::clamp<int64_t>(rows_per_sm, 1, std::max(1, ring_threads(device) / plan.lanes));
    while (groups * plan.lanes % 32 != 0) ++groups;  // whole warps
    plan.threads = static_cast<int>(groups * plan.lanes);
    plan.blocks = std::clamp<int64_t>(ceil_div(p.outer, groups), 1, device.num_sms);
    plan.reason = "persistent blocks, rows in a ring, 16-byte accesses";
    return plan;
  }
  if (p.length <= kSoftmaxHeldLength) {
    plan.form = SoftmaxForm::kHeld;
    plan.vec = 1;
    plan.vectors = kSoftmaxElements;
    plan.lanes = static_cast<int>(softmax_lanes(p.length, kSoftmaxElements));
    plan.threads = kSoftmaxHeldThreads / plan.lanes * plan.lanes;
    plan.blocks = ceil_div(p.outer, int64_t{plan.threads / plan.lanes});
    plan.reason = "a row or address is no multiple of 16 bytes: element accesses";
    return plan;
  }
  plan.form = SoftmaxForm::kLooped;
  if (!is_aligned) plan.vec = 1;
  plan.vectors = 4;
  plan.threads = plan.lanes = p.length <= 4096 ? 256 : kSoftmaxThreads;
  plan.blocks = p.outer;
  plan.reason = "rows of odd length, or longer than a block's registers, read twice";
  if (operands == 1 && is_aligned && is_softmax_row_staged(p, p.length * size, device)) {
    plan.form = SoftmaxForm::kStaged;
    plan.threads = plan.lanes = kSoftmaxStagedThreads;
    plan.reason = "rows of odd length, or longer than a block's registers, in shared memory";
  }
  return plan;
}

inline SoftmaxPlan choose_softmax_columns(const SoftmaxShape& p, int64_t size, int operands,
                                          bool is_aligned) {
  SoftmaxPlan plan{};
  plan.vec = is_aligned && p.inner * size % 16 == 0 ? static_cast<int>(16 / size) : 1;
  plan.vectors = kSoftmaxColumnRows / operands;
  const int64_t columns = p.outer * p.inner / plan.vec;  // vectors
  const int64_t narrowest =
      std::min(std::bit_ceil(static_cast<uint64_t>(kSoftmaxColumnBytes / (size * plan.vec))),
               std::bit_ceil(static_cast<uint64_t>(columns)));
  const auto down = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(ceil_div(p.length, int64_t{plan.vectors}))));
  plan.threads = down * narrowest <= kSoftmaxHeldThreads ? kSoftmaxHeldThreads : kSoftmaxThreads;
  const bool fits = down * narrowest <= plan.threads;
  plan.form = fits ? SoftmaxForm::kColumns : SoftmaxForm::kLoopedColumns;
  plan.lanes = static_cast<int>(fits ? plan.threads / down : narrowest);
  plan.blocks = ceil_div(columns, int64_t{plan.lanes});
  plan.reason = fits ? "columns held by a block" : "columns longer than a block's registers";
  return plan;
}

inline SoftmaxPlan choose_softmax(const SoftmaxParams& p, const DeviceInfo& device) {
  const uintptr_t addresses = addresses_of(p.input, p.output);
  const int64_t size = dtype_size(p.dtype);
  const bool is_aligned = addresses % 16 == 0;
  return p.inner == 1 ? choose_softmax_rows(p, size, 1, is_aligned, device)
                      : choose_softmax_columns(p, size, 1, is_aligned);
}

inline SoftmaxPlan choose_softmax_backward(const SoftmaxBackwardParams& p,
                                           const DeviceInfo& device) {
  const uintptr_t addresses = addresses_of(p.output, p.grad_output, p.grad_input);
  const int64_t size = dtype_size(p.output_dtype);
  const bool is_aligned = addresses % 16 == 0;
  return p.inner == 1 ? choose_softmax_rows(p, size, 2, is_aligned, device)
                      : choose_softmax_columns(p, size, 2, is_aligned);
}

inline std::string describe(const SoftmaxPlan& plan) {
  const bool is_columns =
      plan.form == SoftmaxForm::kColumns || plan.form == SoftmaxForm::kLoopedColumns;
  return std::to_string(plan.blocks) + " block(s) of " + std::to_string(plan.threads) +
         " threads, " + std::to_string(plan.lanes) +
         (is_columns ? " access(es) across, " : " per row, ") + std::to_string(plan.vec) +
         " element(s) per access: " + plan.reason;
}

void softmax_cpu(const SoftmaxParams& params);
void softmax_backward_cpu(const SoftmaxBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_softmax(const SoftmaxParams& params, const SoftmaxPlan& plan, cudaStream_t stream);
void launch_softmax_backward(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
