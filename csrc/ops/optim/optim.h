// One optimizer step for a list of parameters: SGD and Adam/AdamW, with unscaling of the gradients,
// clipping by their global norm, and zeroing.
// Memory-bound. Bytes per step (E = bytes of the parameters, all fp32): SGD 3E, with momentum 5E,
// AdamW 7E; + E if the gradients are written too (unscaled or zeroed), + E for the norm's own read,
// + E/2 for 16-bit copies of the new values.
// A step is one launch for hundreds of tensors. The table of pointers is a kernel argument, because
// the gradients' addresses change at every step.
#pragma once

#include <cstdint>

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
  double* partials;         // CUDA: grad_norm_workspace() numbers
  unsigned* counter;        // CUDA: one zero, zero again afterwards
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

constexpr int kGradNormUnroll = 4;  // 16-byte loads per thread

// How many elements of a gradient come before its first 16-byte boundary.
inline int grad_norm_head(const GradNormTensor& t) {
  const int64_t size = dtype_size(t.dtype);
  const int64_t misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.grad) % 16);
  const int64_t head = (16 - misalignment) % 16 / size;
  return static_cast<int>(head < t.numel ? head : t.numel);
}

inline int64_t grad_norm_chunks(const GradNormTensor& t) {
  const int vec = 16 / static_cast<int>(dtype_size(t.dtype));
  return count_chunks(t.numel, grad_norm_head(t), vec, kGradNormUnroll);
}

// How many partial sums a norm over these tensors needs: one per block.
inline int64_t grad_norm_workspace(const GradNormTensor* tensors, int64_t num_tensors) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < num_tensors; ++i) chunks += grad_norm_chunks(tensors[i]);
  return chunks;
}

void sgd_step_cpu(const SgdParams& params);
void adam_step_cpu(const AdamParams& params);
void grad_norm_cpu(const GradNormParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_sgd_step(const SgdParams& params, cudaStream_t stream);
void launch_adam_step(const AdamParams& params, cudaStream_t stream);
void launch_grad_norm(const GradNormParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
