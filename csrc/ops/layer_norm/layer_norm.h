// layer_norm: y = (x - mean) * rstd * weight + bias over the last dimensions, with
// rstd = 1 / sqrt(var + eps). rms_norm is the same with mean = 0: rstd = 1 / sqrt(mean(x^2) + eps).
// Memory-bound. A group of threads holds a row in registers: one read and one write forward. The
// backward reads x and dy once and writes dx. Persistent blocks also sum the gradients of weight
// and bias in registers; a small second kernel adds the blocks' partial sums in order. Rows too
// long for registers are read again, and separate kernels sum over the rows. Bytes (E = bytes of
// x): 2E forward, 3E backward. Long rows: up to 4E and 5E + 3E, mostly from L2.
//
// y and dy have the type of x, or a 16-bit type if x is float32: the type that the next layer
// reads. add_layer_norm and add_rms_norm normalize x = residual + branch and also write x. Their
// backward adds the gradient of x in the same pass. Bytes, all of one type: 4E forward, 4E
// backward.
//
// Layout: x, dy, residual and branch (rows, cols), column stride 1, any row stride; outputs dense.
#pragma once

#include <algorithm>
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

// One value per column, dense. Null data: absent. The type is the input's or float32.
struct NormVector {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};

struct LayerNormParams {
  DType dtype;         // of x
  DType output_dtype;  // the same, or 16 bits next to float32
  bool centered;       // layer_norm; else rms_norm
  int64_t rows, cols;
  const void* input;
  int64_t input_stride;  // elements between rows
  void* output;
  NormVector weight, bias;  // rms_norm has no bias
  double eps;
  void* mean;  // (rows), float, or double for a double input; null: not centered
  void* rstd;  // (rows), the same
  // add_layer_norm and add_rms_norm: `input` is the residual. Null: no addition.
  const void* branch = nullptr;
  DType branch_dtype;     // as output_dtype
  int64_t branch_stride;  // elements between rows
  void* sum = nullptr;    // dense, of `dtype`
};

struct LayerNormBackwardParams {
  DType dtype;       // of x
  DType grad_dtype;  // of grad_output: the same, or 16 bits next to float32
  bool centered;
  int64_t rows, cols;
  const void* grad_output;
  int64_t grad_stride;
  const void* input;
  int64_t input_stride;
  NormVector weight;
  const void* mean;  // the forward's
  const void* rstd;
  void* grad_input;                   // null: not wanted
  NormVector grad_weight, grad_bias;  // null data: not wanted
  // add_layer_norm and add_rms_norm: the gradient of x itself, of `dtype`. Null: no addition.
  const void* grad_sum = nullptr;
  int64_t grad_sum_stride;
  // A copy of grad_input in the branch's type, where that differs from `dtype`. Null: not wanted.
  void* grad_branch = nullptr;
  DType branch_dtype;

  constexpr bool needs_sums() const {
    return grad_weight.data != nullptr || grad_bias.data != nullptr;
  }
};

// ---- forward ----

enum class NormForm {
  kPersistent,  // persistent blocks, whose groups walk rows through a ring
  kHeld,        // a group holds its row in registers
  kLooped,      // a block reads its row again
};

struct LayerNormPlan {
  NormForm form;
  int vec;      // elements per access
  int vectors;  // per thread
  int lanes;    // per group
  int threads;  // per block
  int64_t blocks;
  const char* reason;
};

constexpr int kNormThreads = 256;       // per block of several rows
constexpr int kNormMaxThreads = 1024;   // per block of one row
constexpr int kNormMaxVectors = 8;      // per thread
constexpr int kNormElementVectors = 8;  // the same, for accesses of one element
constexpr int kNormLoopThreads = 512;   // per block that reads its row three times

// Threads per group if each holds `held` vectors, without an upper limit.
constexpr int64_t norm_lanes(int64_t vectors, int held) {
  const int64_t lanes = ceil_div(vectors, held);
  if (lanes > 32) return ceil_div(lanes, 32) * 32;
  int64_t power = 1;
  while (power < lanes) power *= 2;
  return power;
}

// How persistent blocks share the rows: whole groups, and no more blocks than keep all SMs busy.
struct NormGroups {
  int threads;
  int64_t blocks;

  NormGroups(int64_t rows, int lanes, const DeviceInfo& device) {
    const int64_t most = std::max(1, ring_threads(device) / lanes);
    int64_t groups = std::clamp<int64_t>(ceil_div(rows, int64_t{device.num_sms}), 1, most);
    while (groups * lanes % 32 != 0) ++groups;  // whole warps
    threads = static_cast<int>(groups * lanes);
    blocks = std::clamp<int64_t>(ceil_div(rows, groups), 1, device.num_sms);
  }
};

// `addresses`: bitwise or of the element pointers and row pitches in bytes, as integers.
inline LayerNormPlan choose_layer_norm(const LayerNormParams& p, uintptr_t addresses,
                                       const DeviceInfo& device) {
  LayerNormPlan plan{};
  const int wide = static_cast<int>(16 / dtype_size(p.dtype));
  const bool aligned = addresses % 16 == 0 && p.cols % wide == 0;
  plan.vec = aligned ? wide : 1;
  const int64_t vectors = p.cols / plan.vec;
  const int most = aligned ? kNormMaxVectors : kNormElementVectors;
  if (vectors > int64_t{most} * kNormMaxThreads) {
    plan.form = NormForm::kLooped;
    plan.threads = plan.lanes = kNormLoopThreads;
    plan.vectors = 1;
    plan.blocks = p.rows;
    plan.reason = "rows longer than a block's registers, read three times";
    return plan;
  }
  if (aligned && vectors <= int64_t{2} * ring_threads(device)) {
    plan.form = NormForm::kPersistent;
    plan.vectors = vectors > 1 ? 2 : 1;
    plan.lanes = static_cast<int>(norm_lanes(vectors, plan.vectors));
    const NormGroups groups(p.rows, plan.lanes, device);
    plan.threads = groups.threads;
    plan.blocks = groups.blocks;
    plan.reason = "persistent blocks, rows in a ring, 16-byte accesses";
    return plan;
  }
  plan.form = NormForm::kHeld;
  plan.vectors = most;
  plan.lanes = static_cast<int>(norm_lanes(vectors, most));
  plan.threads = std::max(1, kNormThreads / plan.lanes) * plan.lanes;  // whole groups
  plan.blocks = ceil_div(p.rows, int64_t{plan.threads / plan.lanes});
  plan.reason = aligned ? "a row held by a block, 16-byte accesses"
                        : "a row or address is no multiple of 16 bytes: element accesses";
  return plan;
}

// The most vectors per thread and operand of a kernel that adds: registers keep the weight and bias
// (or their sums) of every column.
constexpr int norm_add_vectors(int64_t element_size, bool centered) {
  return element_size == 2 && centered ? 2 : 4;
}

// Persistent blocks for rows that adds_in_kernel() accepts.
template <class Plan>
void plan_added_rows(Plan& plan, DType dtype, int64_t rows, int64_t cols,
                     const DeviceInfo& device) {
  plan.vec = static_cast<int>(16 / dtype_size(dtype));
  const int64_t vectors = cols / plan.vec;
  plan.vectors = norm_lanes(vectors, 2) > ring_threads(device) ? 4 : 2;
  plan.lanes = static_cast<int>(norm_lanes(vectors, plan.vectors));
  const NormGroups groups(rows, plan.lanes, device);
  plan.threads = groups.threads;
  plan.blocks = groups.blocks;
}

inline LayerNormPlan choose_add_layer_norm(const LayerNormParams& p, const DeviceInfo& device) {
  LayerNormPlan plan{};
  plan.form = NormForm::kPersistent;
  plan_added_rows(plan, p.dtype, p.rows, p.cols, device);
  plan.reason = "persistent blocks add rows on their way through a ring, 16-byte accesses";
  return plan;
}

inline std::string describe(const LayerNormPlan& plan) {
  return std::to_string(plan.blocks) + " block(s) of " + std::to_string(plan.threads) +
         " threads, " + std::to_string(plan.lanes) + " per row, " + std::to_string(plan.vectors) +
         " access(es) of " + std::to_string(plan.vec) + " element(s) each: " + plan.reason;
}

// ---- backward ----

struct LayerNormBackwardPlan {
  bool held;       // persistent groups; else a kernel per gradient
  int vec;         // elements per access
  int vectors;     // per thread and operand
  int lanes;       // per group
  int threads;     // per block
  int64_t blocks;  // persistent: each writes a row of partial sums
  int splits;      // not held: runs of rows that are summed separately
  const char* reason;

  // Memory for the sums of weight and bias; an element has the input's accumulator type.
  int64_t workspace_bytes(const LayerNormBackwardParams& p) const {
    if (!p.needs_sums()) return 0;
    const int64_t element = p.dtype == DType::kFloat64 ? 8 : 4;
    return (held ? blocks : splits) * p.cols * 2 * element;
  }
};

// The most per thread and operand. Two sums per column of a thread (one without a mean) and two
// operands must fit 128 registers.
constexpr int norm_backward_vectors(int64_t element_size, bool centered) {
  return element_size == 8 && centered ? 2 : 4;
}

constexpr int kNormSumLanes = 32;  // columns of a block that adds up partial sums

inline LayerNormBackwardPlan choose_layer_norm_backward(const LayerNormBackwardParams& p,
                                                        uintptr_t addresses,
                                                        const DeviceInfo& device) {
  LayerNormBackwardPlan plan{};
  const int wide = static_cast<int>(16 / dtype_size(p.dtype));
  const bool aligned = addresses % 16 == 0 && p.cols % wide == 0;
  plan.vec = aligned ? wide : 1;
  plan.splits = 1;
  const int64_t vectors = p.cols / plan.vec;
  const int most = norm_backward_vectors(dtype_size(p.dtype), p.centered);
  if (!aligned || vectors > int64_t{most} * ring_threads(device)) {
    plan.threads = plan.lanes = kNormLoopThreads;
    plan.vectors = 1;
    plan.blocks = p.rows;
    const int64_t tiles = ceil_div(p.cols, int64_t{kNormSumLanes});
    plan.splits = static_cast<int>(std::clamp<int64_t>(
        p.rows / 64, 1, std::max<int64_t>(1, 8 * device.num_sms / std::max<int64_t>(tiles, 1))));
    plan.reason = aligned ? "rows longer than a block's registers: a kernel per gradient"
                          : "a row or address is no multiple of 16 bytes: a kernel per gradient";
    return plan;
  }
  plan.held = true;
  int held = vectors > 1 ? 2 : 1;
  while (held < most && norm_lanes(vectors, held) > ring_threads(device)) held *= 2;
  plan.vectors = held;
  plan.lanes = static_cast<int>(norm_lanes(vectors, held));
  const NormGroups groups(p.rows, plan.lanes, device);
  plan.threads = groups.threads;
  plan.blocks = groups.blocks;
  plan.reason = "persistent blocks, rows in a ring, sums of weight and bias in registers";
  return plan;
}

inline LayerNormBackwardPlan choose_add_layer_norm_backward(const LayerNormBackwardParams& p,
                                                            const DeviceInfo& device) {
  LayerNormBackwardPlan plan{};
  plan.held = true;
  plan.splits = 1;
  plan_added_rows(plan, p.dtype, p.rows, p.cols, device);
  plan.reason = "persistent blocks, rows of three operands in a ring, sums in registers";
  return plan;
}

inline std::string describe(const LayerNormBackwardPlan& plan) {
  return std::to_string(plan.blocks) + " block(s) of " + std::to_string(plan.threads) +
         " threads, " + std::to_string(plan.lanes) + " per row, " + std::to_string(plan.vectors) +
         " access(es) of " + std::to_string(plan.vec) + " element(s) per operand: " + plan.reason;
}

// Bitwise or of the call's element pointers and row pitches, in bytes.
// Every operand counts as one of the widest type: the narrower ones have as many elements per
// access.
inline uintptr_t norm_addresses(const LayerNormParams& p) {
  const int64_t stride = p.input_stride | (p.branch == nullptr ? 0 : p.branch_stride);
  return addresses_of(p.input, p.output, p.weight.data, p.bias.data, p.branch, p.sum) |
         static_cast<uintptr_t>(stride * dtype_size(p.dtype));
}
inline uintptr_t norm_addresses(const LayerNormBackwardParams& p) {
  const int64_t stride =
      p.grad_stride | p.input_stride | (p.grad_sum == nullptr ? 0 : p.grad_sum_stride);
  return addresses_of(p.grad_output, p.input, p.grad_input, p.weight.data, p.grad_sum,
                      p.grad_branch) |
         static_cast<uintptr_t>(stride * dtype_size(p.dtype));
}

// Whether one kernel adds and normalizes. If not, the call adds in a kernel of its own.
template <class Params>
bool adds_in_kernel(const Params& p, const DeviceInfo& device) {
  const int64_t size = dtype_size(p.dtype), vec = 16 / size;
  return p.dtype != DType::kFloat64 && norm_addresses(p) % 16 == 0 && p.cols % vec == 0 &&
         p.cols / vec <= int64_t{norm_add_vectors(size, p.centered)} * ring_threads(device);
}

void layer_norm_cpu(const LayerNormParams& params);
void layer_norm_backward_cpu(const LayerNormBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_layer_norm(const LayerNormParams& params, const LayerNormPlan& plan,
                       cudaStream_t stream);
void launch_layer_norm_backward(const LayerNormBackwardParams& params,
                                const LayerNormBackwardPlan& plan, void* workspace,
                                cudaStream_t stream);
// With a branch, or a gradient of the sum, and rows that adds_in_kernel() accepts.
void launch_add_layer_norm(const LayerNormParams& params, const LayerNormPlan& plan,
                           cudaStream_t stream);
void launch_add_layer_norm_backward(const LayerNormBackwardParams& params,
                                    const LayerNormBackwardPlan& plan, void* workspace,
                                    cudaStream_t stream);
#endif

}  // namespace warpwright
