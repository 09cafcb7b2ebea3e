// One optimizer step for a list of parameters: SGD and Adam/AdamW, with unscaling of the gradients,
// clipping by their global norm, and zeroing.
// Memory-bound. Bytes per step (E = bytes of the parameters, all fp32): SGD 3E, with momentum 5E,
// AdamW 7E; + E if the gradients are written too (unscaled or zeroed), + E for the norm's own read,
// + E/2 for 16-bit copies of the new values.
// A step is one launch for hundreds of tensors. The table of pointers is a kernel argument, because
// the gradients' addresses change at every step.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

constexpr int kMaxOptimStates = 3;

// A parameter with its gradient and states: `numel` elements each, in one dense memory order.
struct StepTensor {
  int64_t numel = 0;
  void* param = nullptr;              // StepParams::dtype
  void* grad = nullptr;               // StepParams::grad_dtype
  void* state[kMaxOptimStates] = {};  // StepParams::state_dtype
  float* master = nullptr;            // null, or the fp32 value; `param` is its rounded copy
  void* step = nullptr;               // Adam, steps on the device: one value; else null and
  double inv_correction1 = 1;         // 1 / (1 - beta1^t)
  double inv_correction2_sqrt = 1;    // 1 / sqrt(1 - beta2^t)
};

// A hyperparameter. On the device if `pointer` is not null.
struct Hyper {
  double value;
  const void* pointer = nullptr;
  bool is_double = false;  // else float
};

struct StepParams {
  DType dtype;
  DType state_dtype;  // of the states: `dtype`, or kFloat32 for 16-bit parameters
  DType grad_dtype;   // `dtype`, or kFloat32 for 16-bit copies of fp32 parameters
  const StepTensor* tensors;
  int64_t num_tensors;
  Hyper lr;
  double weight_decay;
  bool maximize;
  bool zero_grad;           // whether the gradients end as zeros
  const float* grad_scale;  // null, or the divisor of the gradients (which are written back)
  const float* found_inf;   // null, or non-zero: skip the step
  const double* clip;       // null, or grad_norm's result (norm, factor)
};

struct SgdParams : StepParams {  // state[0]: momentum buffer, if momentum != 0
  double momentum, dampening;
  bool nesterov;
  bool first_step;  // the buffers are uninitialised
};

struct AdamParams : StepParams {  // state: exp_avg, exp_avg_sq, and max_exp_avg_sq with amsgrad
  Hyper beta1, beta2;
  double eps;
  bool amsgrad;
  bool decoupled_weight_decay;  // AdamW
  bool step_is_double;          // whether the device's step counts are double; else float
  unsigned* counter;  // CUDA with step counts on the device: one zero, zero again afterwards
};

struct GradNormTensor {
  int64_t numel;
  const void* grad;
  DType dtype;
};

struct GradNormParams {
  const GradNormTensor* tensors;
  int64_t num_tensors;
  double max_norm;
  const float* grad_scale;  // null, or the divisor of the gradients
  double* result;           // (2): norm; factor = min(1, max_norm / (norm + 1e-6))
  unsigned* counter;        // CUDA: one zero, zero again afterwards
};

// ---- the plan ----

// A launch takes its tensors as a table in the kernel's arguments. Since CUDA 12.1 these may have
// 32764 bytes (4 KB before). Short lists take a small table, because every launch copies all of it.
// 512 bytes are for the scalars.
constexpr int kSmallTableBytes = 4096 - 512;
#if !defined(CUDART_VERSION) || CUDART_VERSION >= 12010
constexpr int kLargeTableBytes = 32764 - 512;
#else
constexpr int kLargeTableBytes = kSmallTableBytes;
#endif
constexpr int table_capacity(int table_bytes, int entry_bytes) {
  return (table_bytes - 16) / (entry_bytes + static_cast<int>(sizeof(uint32_t)));
}

struct OptimPlan {
  struct Tensor {
    int head;        // elements before the first vector; -1: one element per access
    int64_t blocks;  // at least one
  };
  struct Launch {
    int64_t first, count;  // tensors
    int64_t blocks;
  };
  int unroll;        // 16-byte loads of each operand per thread
  bool small_table;  // it holds all tensors and costs a launch less; else the largest
  std::vector<Tensor> tensors;
  std::vector<Launch> launches;

  int64_t blocks() const {
    int64_t all = 0;
    for (const Launch& launch : launches) all += launch.blocks;
    return all;
  }
};
struct GradNormPlan : OptimPlan {
  int64_t workspace_bytes() const { return blocks() * 8; }  // a partial sum per block
};

// How many elements of `t` come before the first place where every operand is at a multiple of 16
// bytes; -1 if there is none. A view at an odd offset with freshly allocated state has none, and
// loads single elements.
inline int vector_head(const StepTensor& t, const StepParams& p) {
  auto aligned = [](const void* pointer, int64_t bytes) {
    return (reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(bytes)) % 16 == 0;
  };
  const int64_t size = dtype_size(p.dtype), grad_size = dtype_size(p.grad_dtype);
  const int64_t state_size = dtype_size(p.state_dtype);
  for (int head = 0; head < 16 / size && head <= t.numel; ++head) {
    bool all = aligned(t.param, head * size) && aligned(t.grad, head * grad_size);
    for (const void* state : t.state) all &= state == nullptr || aligned(state, head * state_size);
    all &= t.master == nullptr || aligned(t.master, head * int64_t{4});
    if (all) return head;
  }
  return -1;
}

constexpr int kOptimThreads = 256;

// Blocks per tensor: `unroll` vectors of `vec` elements per thread; scalar tensors have as many
// elements per block. The first block also takes head and tail (each shorter than a vector).
inline int64_t count_chunks(int64_t numel, int head, int vec, int unroll) {
  const int64_t vectors = head < 0 ? (numel + vec - 1) / vec : (numel - head) / vec;
  const int64_t chunks = (vectors + int64_t{kOptimThreads} * unroll - 1) / (kOptimThreads * unroll);
  return chunks > 0 ? chunks : 1;
}

// Cuts the tensors into launches. `entry_bytes`: a tensor's size in the table.
inline void plan_launches(OptimPlan& plan, int entry_bytes) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  const int small = table_capacity(kSmallTableBytes, entry_bytes);
  const auto count = static_cast<int64_t>(plan.tensors.size());
  plan.small_table = count <= small;
  const int capacity = plan.small_table ? small : table_capacity(kLargeTableBytes, entry_bytes);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t blocks = plan.tensors[i].blocks;
    const bool fits = !plan.launches.empty() && plan.launches.back().count < capacity &&
                      plan.launches.back().blocks + blocks <= kMaxBlocks;
    if (!fits) plan.launches.push_back({i, 0, 0});
    ++plan.launches.back().count;
    plan.launches.back().blocks += blocks;
  }
}

// Bytes of a parameter in the table (StepEntry).
constexpr int step_entry_bytes(int states) { return 56 + 8 * (states > 1 ? states : 1); }

inline OptimPlan choose_step(const StepParams& p, int states, int unroll) {
  OptimPlan plan{.unroll = unroll};
  plan.tensors.reserve(p.num_tensors);
  const int vec = 16 / static_cast<int>(dtype_size(p.dtype));
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const int head = vector_head(p.tensors[i], p);
    plan.tensors.push_back({head, count_chunks(p.tensors[i].numel, head, vec, unroll)});
  }
  plan_launches(plan, step_entry_bytes(states));
  return plan;
}

// 16-bit types need twice the registers per byte. `mixed`: fp32 state next to them.
constexpr int sgd_unroll(int64_t param_bytes, bool mixed, bool has_momentum) {
  return mixed ? 1 : !has_momentum ? 4 : param_bytes == 2 ? 1 : 2;
}
constexpr int adam_unroll(int64_t param_bytes) { return param_bytes == 4 ? 2 : 1; }

inline OptimPlan choose_sgd_step(const SgdParams& p) {
  const bool has_momentum = p.momentum != 0;
  return choose_step(p, has_momentum ? 1 : 0,
                     sgd_unroll(dtype_size(p.dtype), p.dtype != p.state_dtype, has_momentum));
}
inline OptimPlan choose_adam_step(const AdamParams& p) {
  return choose_step(p, p.amsgrad ? 3 : 2, adam_unroll(dtype_size(p.dtype)));
}

constexpr int kGradNormUnroll = 4;
constexpr int kGradNormEntryBytes = 24;

inline GradNormPlan choose_grad_norm(const GradNormParams& p) {
  GradNormPlan plan{{.unroll = kGradNormUnroll}};
  plan.tensors.reserve(p.num_tensors);
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    const GradNormTensor& t = p.tensors[i];
    const int64_t size = dtype_size(t.dtype);
    // Elements before the first 16-byte boundary.
    const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.grad) % 16);
    const int64_t aligned = (16 - misalignment) % 16 / size;
    const int head = static_cast<int>(aligned < t.numel ? aligned : t.numel);
    const int vec = 16 / static_cast<int>(size);
    plan.tensors.push_back({head, count_chunks(t.numel, head, vec, kGradNormUnroll)});
  }
  plan_launches(plan, kGradNormEntryBytes);
  return plan;
}

void sgd_step_cpu(const SgdParams& params);
void adam_step_cpu(const AdamParams& params);
void grad_norm_cpu(const GradNormParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_sgd_step(const SgdParams& params, const OptimPlan& plan, cudaStream_t stream);
void launch_adam_step(const AdamParams& params, const OptimPlan& plan, cudaStream_t stream);
// `workspace`: plan.workspace_bytes().
void launch_grad_norm(const GradNormParams& params, const GradNormPlan& plan, void* workspace,
                      cudaStream_t stream);
#endif

}  // namespace warpwright
