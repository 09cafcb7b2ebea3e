// linear_activation(x, W, b) = f(x W^T + b), the activation f in the matrix product's epilogue: no
// pass of its own over y. What the backward keeps: of relu y, whose sign says all; of the others
// z = x W^T + b, which the epilogue writes beside y only if a gradient will be asked for.
// Backward: dz = dy * f'(z) and its column sums, the bias gradient, in one pass: bound by memory,
// 3E bytes (E = bytes of y). The products of linear's backward follow; they read dz twice, so that
// f' in their loaders would be worked out twice, from two operands.
#pragma once

#include "ops/linear/linear.h"

namespace warpwright {

struct ActivationForwardParams {
  DType dtype;
  Activation activation;
  int64_t numel;
  const void* input;  // (numel)
  void* output;       // (numel), may be `input`
};

struct ActivationBackwardParams {
  // Of dz; its matrix, with any strides, is dy. A null `sum`: no bias gradient.
  ColumnSumParams column_sum;
  Activation activation;
  const void* kept;          // (rows, cols), row-major, dense: z, of relu y
  void* grad_preactivation;  // (rows, cols), row-major, dense: dz
};

inline ColumnSumConfig choose_activation_backward_config(const ActivationBackwardParams& p,
                                                         const DeviceInfo& device) {
  return choose_column_sum_config(
      p.column_sum, device,
      reinterpret_cast<uintptr_t>(p.kept) | reinterpret_cast<uintptr_t>(p.grad_preactivation),
      /*ctas_per_sm=*/4);
}

void activation_forward_cpu(const ActivationForwardParams& params);
void activation_backward_cpu(const ActivationBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_activation_backward(const ActivationBackwardParams& params,
                                const ColumnSumConfig& config, cudaStream_t stream);
#endif

}  // namespace warpwright
