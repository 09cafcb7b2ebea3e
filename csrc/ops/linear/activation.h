// linear_activation(x, W, b) = f(x W^T + b), with the activation f in the matrix product's
// epilogue, which saves a pass over y. For relu the backward keeps y, whose sign is enough. For the
// others it keeps z = x W^T + b, which the epilogue also writes if a gradient will be needed.
// Backward: one pass computes dz = dy * f'(z) and its column sums, the bias gradient. Bound by
// memory, 3E bytes (E = bytes of y). The products of linear's backward follow. They read dz twice;
// with f' in their loaders they would compute it twice, from two operands.
#pragma once

#include "common/address.h"
#include "ops/linear/linear.h"

namespace warpwright {

struct LinearActivationForwardParams {
  DType dtype;
  Activation activation;
  int64_t numel;
  const void* input;  // (numel)
  void* output;       // (numel), may be `input`
};

struct LinearActivationBackwardParams {
  // The column sums of dz. The matrix in it, with any strides, is dy. A null `sum`: no bias
  // gradient.
  ColumnSumParams column_sum;
  Activation activation;
  const void* kept;          // (rows, cols), row-major, dense: z, of relu y
  void* grad_preactivation;  // (rows, cols), row-major, dense: dz
};

inline ColumnSumPlan choose_linear_activation_backward(const LinearActivationBackwardParams& p,
                                                       const DeviceInfo& device) {
  return choose_column_sum(
      p.column_sum, device,
      {.other_addresses = addresses_of(p.kept, p.grad_preactivation), .ctas_per_sm = 4});
}

void linear_activation_forward_cpu(const LinearActivationForwardParams& params);
void linear_activation_backward_cpu(const LinearActivationBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_linear_activation_backward(const LinearActivationBackwardParams& params,
                                       const ColumnSumPlan& plan, void* workspace,
                                       cudaStream_t stream);
#endif

}  // namespace warpwright
