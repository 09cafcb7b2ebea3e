// relu(x) = max(x, 0); NaN remains. Memory-bound: 2E bytes forward, 3E backward (E = bytes of x).
// The backward reads the saved output, as native does.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/elementwise.h"

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

inline ElementwisePlan choose_relu(const ReluParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.output, p.input});
}
inline ElementwisePlan choose_relu_backward(const ReluBackwardParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.grad_input, p.grad_output, p.output});
}

void relu_cpu(const ReluParams& params);
void relu_backward_cpu(const ReluBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_relu(const ReluParams& params, const ElementwisePlan& plan, cudaStream_t stream);
void launch_relu_backward(const ReluBackwardParams& params, const ElementwisePlan& plan,
                          cudaStream_t stream);
#endif

}  // namespace warpwright
