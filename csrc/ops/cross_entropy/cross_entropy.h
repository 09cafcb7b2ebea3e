// Cross entropy: the problem (problem.h), how the kernels divide it (config.h, fused_config.h), and
// the launches.
#pragma once

#include "ops/cross_entropy/fused_config.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

void cross_entropy_cpu(const CrossEntropyParams& params);
void cross_entropy_backward_cpu(const CrossEntropyBackwardParams& params);
void cross_entropy_gradient_cpu(const CrossEntropyGradientParams& params);
void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
CrossEntropyConfig cross_entropy_fwd_config(const CrossEntropyParams& params);
inline bool needs_partials(const CrossEntropyParams& params, const CrossEntropyConfig& config) {
  return params.reduction != Reduction::kNone && config.blocks > 1 && !config.cluster;
}
void launch_cross_entropy_fwd(const CrossEntropyParams& params, const CrossEntropyConfig& config,
                              cudaStream_t stream);
void launch_cross_entropy_bwd(const CrossEntropyBackwardParams& params, cudaStream_t stream);
CrossEntropyGradientConfig cross_entropy_gradient_config(const CrossEntropyGradientParams& params);
void launch_cross_entropy_gradient(CrossEntropyGradientParams params,
                                   const CrossEntropyGradientConfig& config, cudaStream_t stream);
// `factor` has type loss_dtype (dtype or Accum). If it is 1, nothing is written.
void launch_cross_entropy_scale(void* gradient, int64_t numel, DType dtype, const void* factor,
                                DType factor_dtype, cudaStream_t stream);
void launch_cross_entropy_double_bwd(const CrossEntropyDoubleBackwardParams& params,
                                     cudaStream_t stream);
#endif

}  // namespace warpwright
