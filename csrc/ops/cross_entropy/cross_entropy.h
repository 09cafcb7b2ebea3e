// Cross entropy: the problem (problem.h), how kernels divide it (rows_plan.h, gradient_plan.h),
// which of them a call takes (plan.h), and the entries.
#pragma once

#include "ops/cross_entropy/plan.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

void cross_entropy_cpu(const CrossEntropyParams& params);
void cross_entropy_backward_cpu(const CrossEntropyBackwardParams& params);
void cross_entropy_gradient_cpu(const CrossEntropyGradientParams& params);
void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// `factor` has type loss_dtype (dtype or Accum). If it is 1, nothing is written.
void launch_cross_entropy_scale(void* gradient, int64_t numel, DType dtype, const void* factor,
                                DType factor_dtype, cudaStream_t stream);
void launch_cross_entropy_double_backward(const CrossEntropyDoubleBackwardParams& params,
                                          cudaStream_t stream);
#endif

}  // namespace warpwright
