// relu(x) = max(x, 0); NaN remains. Memory-bound: 2E bytes forward, 3E backward (E = bytes of x).
// The backward reads the saved output, as native does.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct ReluParams {
  DType dtype;
  int64_t numel;
  const void* input;  // (numel), any dense order
  void* output;       // (numel), same order; may be `input`
};

struct ReluBackwardParams {
  DType dtype;
  int64_t numel;
  const void* grad_output;  // (numel)
  const void* output;       // (numel), of the forward
  void* grad_input;         // (numel)
};

struct ReluPlan {
  bool vectorized;  // 16-byte accesses after a scalar head; else one element per access
  int64_t head;     // elements before the first 16-byte boundary
  const char* reason;
};

inline ReluPlan choose_elementwise(DType dtype, int64_t numel,
                                   std::initializer_list<const void*> operands) {
  auto misalignment = [](const void* operand) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(operand) % 16);
  };
  const int64_t first = misalignment(*operands.begin());
  for (const void* operand : operands) {
    if (misalignment(operand) != first) {
      return {false, 0, "operands are misaligned differently: no common 16-byte boundary"};
    }
  }
  const int64_t size = dtype_size(dtype);
  if (first % size != 0) return {false, 0, "an address is not a multiple of the element"};
  const int64_t head = (16 - first) % 16 / size;
  if (head > numel) return {false, 0, "ends before the first 16-byte boundary"};
  return {true, head, "16-byte accesses"};
}

inline ReluPlan choose_relu(const ReluParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.output, p.input});
}
inline ReluPlan choose_relu_backward(const ReluBackwardParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.grad_input, p.grad_output, p.output});
}

inline std::string describe(const ReluPlan& plan) {
  return std::string(plan.vectorized ? "" : "element accesses: ") + plan.reason;
}

void relu_cpu(const ReluParams& params);
void relu_backward_cpu(const ReluBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_relu(const ReluParams& params, const ReluPlan& plan, cudaStream_t stream);
void launch_relu_backward(const ReluBackwardParams& params, const ReluPlan& plan,
                          cudaStream_t stream);
#endif

}  // namespace warpwright
