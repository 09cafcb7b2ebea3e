// polynomial(x) = x² + x + 1, elementwise. Memory-bound: 2E bytes forward, 3E backward (E = bytes
// of x). Seen by the kernels and by the torch side; includes no torch header.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef POLYNOMIAL_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace polynomial_op {

using warpwright::DType;

struct PolynomialParams {
  DType dtype;
  int64_t numel;
  const void* x;  // (numel), any dense order
  void* y;        // (numel), same order
};

struct PolynomialBackwardParams {
  DType dtype;
  int64_t numel;
  const void* dy;  // (numel), any dense order
  const void* x;   // (numel), same order
  void* dx;        // (numel), same order
};

void polynomial_cpu(const PolynomialParams& params);
void polynomial_backward_cpu(const PolynomialBackwardParams& params);

#ifdef POLYNOMIAL_WITH_CUDA
void launch_polynomial(const PolynomialParams& params, cudaStream_t stream);
void launch_polynomial_backward(const PolynomialBackwardParams& params, cudaStream_t stream);
#endif

}  // namespace polynomial_op
